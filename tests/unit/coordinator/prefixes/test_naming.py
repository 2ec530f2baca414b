"""Names of a prompt's prefixes; that they are vLLM's is tested where vLLM is."""

import pytest

from p2pserve.coordinator.prefixes.naming import prefix_names


def test_a_name_stands_for_the_whole_prompt_up_to_there() -> None:
    names = prefix_names(range(12), 4)
    assert len(set(names)) == 3
    assert prefix_names([*range(8), 99, 99, 99, 99], 4) == [*names[:2], prefix_names([*range(8), *[99] * 4], 4)[2]]
    assert prefix_names([99, *range(1, 12)], 4)[2] != names[2]


def test_what_does_not_fill_a_block_has_no_name() -> None:
    assert prefix_names(range(7), 4) == prefix_names(range(4), 4)
    assert prefix_names(range(3), 4) == []


def test_prompts_under_other_salts_share_no_name() -> None:
    plain, alice, bob = (set(prefix_names(range(64), 4, salt)) for salt in ("", "alice", "bob"))
    assert not plain & alice
    assert not plain & bob
    assert not alice & bob


def test_a_block_has_at_least_a_token() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0"):
        prefix_names([1], 0)
