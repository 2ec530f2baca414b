"""Answers that one engine begins and another goes on with, with and without asynchronous scheduling: the scenarios of
`tests/integration/node/engine/answers/test_first_token.py`."""

from __future__ import annotations

import pytest

from ..integration.node.engine.answers.test_first_token import (
    run,
    test_one_that_is_cancelled_while_it_waits_leaves_its_blocks_to_others,
    test_the_answer_goes_on_without_computing_anything_twice,
)

__all__ = [
    "run",
    "test_one_that_is_cancelled_while_it_waits_leaves_its_blocks_to_others",
    "test_the_answer_goes_on_without_computing_anything_twice",
]

pytestmark = [pytest.mark.usefixtures("scheduling"), pytest.mark.timeout(300)]
