"""What a node makes of published plans, and what it has against some."""

from hashlib import sha256

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Phase, Plan, PlanError
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.plan import Pairing, Replica, Stage
from p2pserve.coordinator.services.hosting import HostingOffer
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.messages import Advert
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.planning.manifest import describe_plan, read_manifest, read_number, read_plan
from p2pserve.node.planning.messages import INLINE_PLAN_BYTES, PlanManifest
from p2pserve.node.planning.plan_intake import PlanIntake, find_conflict
from p2pserve.node.settings import WAN

OWN, LEADER, OTHER = PeerId("own"), PeerId("leader"), PeerId("other")
TERM = (LEADER, 3)
LAYERS = 4
KNOWN = {OWN, LEADER, OTHER}
GPU = Gpu(uuid="GPU-0", name="NVIDIA A40", memory_gib=45.0)
SHAPE = ModelShape(
    name="tiny", layers=LAYERS, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
)


def model(service: str = "tiny", layers: int = LAYERS) -> ModelInfo:
    weights = WeightSizes(layers=(1000,) * layers, embeddings=500, head=500)
    return ModelInfo(
        service=service, shape=msgspec.structs.replace(SHAPE, layers=layers), max_model_len=512, weights=weights
    )


def advert(**changed: object) -> Advert:
    hardware = Hardware(cores=1, memory_gib=1.0, processor="x", gpus=(GPU,))
    told = Advert(hardware=hardware, draining=False, model=model(), fits=LAYERS)
    return msgspec.structs.replace(told, **changed)


def plan(*peers: str, version: int = 1, tp: int = 1, phase: Phase = Phase.MIXED, why: tuple[str, ...] = ()) -> Plan:
    peers = peers or (OWN, OTHER)
    return Plan(
        epoch=3,
        version=version,
        service="tiny",
        replicas=tuple(
            Replica(
                id=peer,
                phase=phase if peer == OWN else Phase.MIXED,
                stages=(Stage(peer=peer, tp=tp if peer == OWN else 1, first_layer=0, last_layer=LAYERS),),
            )
            for peer in peers
        ),
        pairings=(Pairing(prefill=peers[-1], decode=peers[-1], weight=1.0),),
        codec="raw",
        why=why,
    )


def published(of: Plan) -> bytes:
    return msgspec.msgpack.encode(describe_plan(of)[0])


def intake_of(of: Plan, now: float = 0.0) -> PlanIntake:
    intake = PlanIntake(OWN, WAN)
    intake.see(TERM, published(of), now)
    return intake


def plan_in(intake: PlanIntake) -> Plan | None:
    return next((plan for plan, _ in intake.plans), None)


def author_in(intake: PlanIntake) -> PeerId | None:
    return next((author for _, author in intake.plans), None)


def intake_wants_nothing(intake: PlanIntake) -> bool:
    return intake.wanted is None


LARGE = tuple("x" * 200 for _ in range(300))


def test_a_small_plan_is_in_its_manifest_and_a_large_one_is_not() -> None:
    small, _ = describe_plan(plan())
    large, payload = describe_plan(plan(why=LARGE))
    assert read_plan(small, small.plan) == plan()
    assert large.plan == b""
    assert len(payload) == large.size > INLINE_PLAN_BYTES
    assert read_plan(large, payload) == plan(why=LARGE)
    assert read_number(msgspec.msgpack.encode(large)) == (3, 1)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x80", b"\xa1\xff", b"\x81" * 2000, msgspec.msgpack.encode({"epoch": 3})]
)
def test_garbage_is_no_manifest_and_no_plan(payload: bytes) -> None:
    assert read_manifest(payload) is None
    assert read_number(payload) is None
    manifest = PlanManifest(
        epoch=3, version=1, service="tiny", size=max(1, len(payload)), digest=sha256(payload).digest()
    )
    with pytest.raises(PlanError):
        read_plan(manifest, payload)


def test_a_plan_is_that_of_its_manifest() -> None:
    manifest, payload = describe_plan(plan())
    with pytest.raises(PlanError, match="not those of its manifest"):
        read_plan(manifest, payload + b"\x00")
    with pytest.raises(PlanError, match="otherwise"):
        read_plan(msgspec.structs.replace(manifest, version=2), payload)


def test_a_plan_of_248_bytes_that_names_a_tera_of_gpus_is_none() -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(plan()))
    fields["replicas"][0]["stages"][0]["tp"] = 2**40
    payload = msgspec.msgpack.encode(fields)
    manifest = PlanManifest(
        epoch=3, version=1, service="tiny", size=len(payload), digest=sha256(payload).digest(), plan=payload
    )
    intake = PlanIntake(OWN, WAN)
    intake.see(TERM, msgspec.msgpack.encode(manifest), 0.0)
    assert plan_in(intake) is None
    assert "malformed" in intake.find_objection(advert(), KNOWN, 0.0)


def test_a_plan_of_another_epoch_does_not_count_and_is_no_lie() -> None:
    intake = PlanIntake(OWN, WAN)
    intake.see((LEADER, 4), published(plan()), 0.0)
    assert plan_in(intake) is None
    assert intake.wanted is None
    assert intake.find_objection(advert(), KNOWN, 1000.0) == ""


def test_a_large_plan_is_wanted_until_its_bytes_are_here() -> None:
    large = plan(why=LARGE)
    manifest, payload = describe_plan(large)
    intake = intake_of(large)
    assert intake.wanted == manifest
    intake.on_bytes(describe_plan(plan(version=2))[0], payload)
    assert intake.wanted == manifest, "what was fetched before is of no use now"
    intake.on_bytes(manifest, payload)
    assert plan_in(intake) == large
    assert intake_wants_nothing(intake)
    newer = plan(version=2, why=LARGE)
    intake.see(TERM, published(newer), 1.0)
    assert plan_in(intake) == large, "the old one is followed until the new one is here"
    assert intake.wanted == describe_plan(newer)[0]
    intake.on_leader_lost()
    assert intake.wanted is None


def test_a_plan_of_another_coordinator_is_wanted_though_it_has_the_same_number() -> None:
    one, other = plan(why=LARGE), plan(why=("another", *LARGE))
    manifest, payload = describe_plan(one)
    intake = intake_of(one)
    intake.on_bytes(manifest, payload)
    assert (plan_in(intake), author_in(intake), intake.wanted) == (one, TERM[0], None)
    rival = (PeerId("rival"), TERM[1])
    intake.see(rival, published(other), 1.0)
    assert intake.wanted == describe_plan(other)[0]
    assert (plan_in(intake), author_in(intake)) == (one, TERM[0])
    intake.on_bytes(*describe_plan(other))
    assert (plan_in(intake), author_in(intake)) == (other, rival[0])
    assert intake_wants_nothing(intake)


def test_a_plan_whose_bytes_nobody_has_is_objected_to_in_the_end() -> None:
    intake = intake_of(plan(why=LARGE), now=10.0)
    assert intake.find_objection(advert(), KNOWN, 10.0 + WAN.plan_missing_s - 1) == ""
    assert "nobody has its bytes" in intake.find_objection(advert(), KNOWN, 10.0 + WAN.plan_missing_s)


def test_what_is_malformed_is_objected_to_at_once() -> None:
    intake = PlanIntake(OWN, WAN)
    intake.see(TERM, b"junk", 0.0)
    assert intake.find_objection(advert(), KNOWN, 0.0) == "it is malformed"


def test_a_plan_for_boxes_that_nobody_knows_is_objected_to_after_a_moment() -> None:
    intake = intake_of(plan("made up", "too"))
    assert intake.find_objection(advert(), KNOWN, WAN.plan_strange_s - 1) == ""
    assert "none of its boxes" in intake.find_objection(advert(), KNOWN, WAN.plan_strange_s)


def test_all_boxes_of_another_service_may_be_lost() -> None:
    lost = msgspec.structs.replace(plan(), service="another")
    assert intake_of(lost).find_objection(advert(), (), 1000.0) == ""
    assert "none of its boxes" in intake_of(plan()).find_objection(advert(), (), 1000.0)


def test_a_box_that_hosts_what_it_is_given_may_have_been_given_something_else_since() -> None:
    moved = msgspec.structs.replace(plan(), service="another")
    fixed = msgspec.structs.replace(advert(), fits=4)
    hosting = msgspec.structs.replace(fixed, hosting=HostingOffer(hosts="chat"))
    assert "to serve another, which it does not have" in find_conflict(moved, OWN, fixed)
    assert find_conflict(moved, OWN, hosting) == ""
    assert find_conflict(plan(), OWN, hosting) == find_conflict(plan(), OWN, fixed)


def test_the_coordinator_objects_to_nothing_of_its_own() -> None:
    intake = PlanIntake(OWN, WAN)
    intake.see((OWN, 3), b"junk", 0.0)
    assert intake.find_objection(advert(), KNOWN, 1000.0) == ""


def test_what_does_not_fit_this_box_is_objected_to_once_it_cannot_be_an_old_plan_any_more() -> None:
    intake = intake_of(plan())
    small = advert(fits=2)
    assert intake.find_objection(advert(), KNOWN, 100.0) == ""
    assert intake.find_objection(small, KNOWN, 200.0) == "", "it has only just said so"
    assert intake.find_objection(small, KNOWN, 200.0 + WAN.plan_stale_s - 1) == ""
    assert "room for 2" in intake.find_objection(small, KNOWN, 200.0 + WAN.plan_stale_s)
    intake.see(TERM, published(plan(OTHER, version=2)), 300.0)
    assert intake.find_objection(small, KNOWN, 400.0) == "", "the next plan leaves it out"


@pytest.mark.parametrize(
    ("of", "told", "says"),
    [
        (plan(), advert(), ""),
        (plan(OTHER), advert(model=None, fits=0), ""),
        (plan(), advert(model=None), "does not have"),
        (plan(), advert(model=model("another")), "does not have"),
        (plan(), advert(model=model(layers=8), fits=8), "8 layers"),
        (plan(), advert(fits=3), "room for 3"),
        (plan(tp=2), advert(), "2 GPUs"),
        (plan(tp=2), advert(tp=2), ""),
        (plan(), advert(hardware=Hardware(cores=1, memory_gib=1.0, processor="x")), ""),
        (plan(phase=Phase.PREFILL), advert(phase=Phase.PREFILL), ""),
        (plan(phase=Phase.PREFILL), advert(phase=Phase.DECODE), "its owner has said decode"),
    ],
)
def test_what_a_box_knows_of_itself(of: Plan, told: Advert, says: str) -> None:
    found = find_conflict(of, OWN, told)
    assert says in found
    assert bool(found) == bool(says)
