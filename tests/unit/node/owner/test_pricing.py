"""What a box costs, from its start on and anew while it runs."""

import trio

from p2pserve.bootstrap import PeerId
from p2pserve.node.owner.messages import Drained
from p2pserve.node.owner.pricing import PriceTag, describe_price
from p2pserve.node.owner.questions import OwnerAnswer, OwnerQuestion

HERE, THERE = PeerId("12D3KooWhere"), PeerId("12D3KooWthere")


class Owned:
    """A price tag, the changes it has told of, and the questions that were left to others."""

    def __init__(self) -> None:
        self.changes: list[tuple[float, float]] = []
        self.left: list[OwnerQuestion] = []
        self.tag = PriceTag(0.42, lambda before, now: self.changes.append((before, now)))

    def ask(self, question: OwnerQuestion) -> OwnerAnswer:
        async def others(question: OwnerQuestion) -> OwnerAnswer:
            self.left.append(question)
            return OwnerAnswer(node=THERE if question.box else HERE, drained=Drained(draining=False))

        return trio.run(self.tag.answer, question, HERE, others)


def test_a_price_is_told_and_changed_and_each_change_is_heard_of_once() -> None:
    box = Owned()
    assert box.ask(OwnerQuestion()).usd_per_hour == 0.42
    for usd in (0.35, 0.35, 0.0):
        assert box.ask(OwnerQuestion(usd_per_hour=usd)).usd_per_hour == usd
    assert box.changes == [(0.42, 0.35), (0.35, 0.0)]
    assert box.tag.usd_per_hour == 0.0


def test_other_questions_are_left_to_others_and_other_boxes_have_their_own_price() -> None:
    box = Owned()
    draining = OwnerQuestion(draining=True)
    answer = box.ask(draining)
    assert (box.left, answer.drained, answer.usd_per_hour) == ([draining], Drained(draining=False), 0.42)
    assert box.ask(OwnerQuestion(box="calm-heron")).usd_per_hour is None
    refused = box.ask(OwnerQuestion(box="calm-heron", usd_per_hour=0.1))
    assert (refused.fault, refused.node, box.changes) == ("usage", "", [])
    assert "only its own owner" in refused.failed


def test_prices_in_words() -> None:
    assert [describe_price(usd) for usd in (0.35, 12.5, 0.0)] == ["$0.35/h", "$12.5/h", "no price"]
