"""Emulated engines of a run: options of boxes, prompts, and the answers that are right."""

import random

from p2pserve.node.engine.emulated.tokens import EmulatedAnswer
from p2pserve.sdk.chaos.engines import SHORTEST, choose_setup
from p2pserve.sdk.chaos.schedule import ChaosSettings

SETUP = choose_setup(ChaosSettings(boxes=5, prompt=20))


def test_boxes_are_pinned_to_both_phases_in_turn() -> None:
    assert [options[-2:] for options in SETUP.options] == [
        ("--phase", phase) for phase in ("decode", "prefill", "decode", "prefill", "decode")
    ]


def test_prompts_are_within_their_bounds() -> None:
    rng = random.Random(0)
    prompts = [SETUP.draw_prompt(rng) for _ in range(200)]
    assert {len(prompt) for prompt in prompts} == set(range(SHORTEST, 21))
    assert min(map(min, prompts)) >= 1


def test_the_right_answer_is_the_engines_own_and_any_part_of_it_is_a_part_of_a_longer_one() -> None:
    prompt = (5, 6, 7)
    right = SETUP.expect(prompt, 30)
    assert SETUP.expect(prompt, 10) == right[:10]
    engine = EmulatedAnswer((*prompt, *right[:10]), 4096)
    assert engine.next() == right[10], "another engine, given what there is of it, goes on with it"
