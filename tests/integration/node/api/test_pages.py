"""Every command of README and docs is run, and shows what the page shows; what cannot be is listed with its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from ....unit.docs.console import ROOT, Example, all_examples
from .servers import Server
from .walk import Outcome, Place, Walk, has_shape, open_network, write_programs

pytestmark = pytest.mark.timeout(500)

OFFERS = ROOT / "tests" / "unit" / "coordinator" / "data" / "vast_offers.json"
MAX_OFFERS = 8
AT_ONCE = 3

SERVED = "p2pserve serve bundled"
"""What the server was started with that the tests of this folder share; the pages' clients of OpenAI's API ask it."""

ELSEWHERE = {
    "docs/extending.md: ": "tests/integration/node/engine/test_extending.py",
    "docs/emulated.md: python -m p2pserve.sdk.live_comparison ": "tests/integration/sdk/runs/test_live_runs.py",
    "docs/wan.md: scenario = ": "tests/integration/sims/test_wan.py",
    "docs/wan.md: python -m p2pserve.sims.wan run ": "tests/integration/sims/test_wan.py",
    "make demo": "tests/integration/sdk/test_demo.py",
    ".venv/bin/p2pserve demo --wan": "tests/integration/sdk/test_wan_demo.py",
    "make gpu-check": "tests/integration/node/engine/test_gpu_check.py",
    "pip install .": "tests/integration/sdk/test_client_wheel.py",
    "rented/rent.sh": "tests/integration/test_rent_scripts.py",
}
"""What an example begins with, with its page or without, and the test that runs it."""

NOT_RUN = {
    "make test": "runs this test",
    "make setup": "made the environment that this test runs in, from an index of packages",
    "apt-get ": "changes the machine, from an index of packages",
    "pip install --no-deps ": "needs an index of packages",
    "docker ": "needs Docker, and the image of CUDA",
    "vastai ": "needs a key of the market, and money",
    "docs/codecs.md: warm_up": "needs a GPU; tests/gpu/test_kernels_triton.py does the same",
    "docs/kvtransport.md: with Endpoint()": "a sketch: its frames come from an engine",
}
"""What an example begins with, with its page or without, and why no test runs it."""

OWNS = ("docs/start/", "docs/models.md")
"""Pages whose later commands are for a network that they start."""

EXAMPLES = all_examples()


def begins(example: Example, table: Iterable[str]) -> list[str]:
    """The entries of a table that an example begins with."""
    return [entry for entry in table if str(example).startswith(entry) or example.text.startswith(entry)]


RUN = [example for example in EXAMPLES if not begins(example, [*ELSEWHERE, *NOT_RUN])]


@dataclass
class Walks:
    """All pages, walked: how each example has ended, and what of those that stay did not end in order."""

    outcomes: dict[Example, Outcome] = field(default_factory=dict)
    unended: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def walks(ours: Server, tmp_path_factory: pytest.TempPathFactory) -> Walks:
    """Pages beside each other, the examples of each in their order."""
    folder = tmp_path_factory.mktemp("pages")
    write_programs(folder / "bin")
    walks = Walks()
    with open_network(folder / "network", ours.url) as network, ThreadPoolExecutor(AT_ONCE) as pool:

        def walk_page(page: str) -> None:
            owns = page.startswith(OWNS)
            walk = Walk(folder / page.replace("/", "-"), network.place, ours.url, network.request, owns=owns)
            prepare(walk, page, ours, network)
            for example in RUN:
                if example.page == page:
                    walks.outcomes[example] = run_example(walk, example, ours)
            walks.unended.extend(walk.end())

        list(pool.map(walk_page, dict.fromkeys(example.page for example in RUN)))
    return walks


def run_example(walk: Walk, example: Example, ours: Server) -> Outcome:
    if walk.here(example.text).startswith(SERVED):
        return Outcome(0, ours.log.read_text())
    return walk.run(example)


def prepare(walk: Walk, page: str, ours: Server, network: Walk) -> None:
    """What the page takes for granted: files of offers, prompts, keys, events; what it speaks of."""
    walk.folder.mkdir()
    if page == "docs/gateway.md":
        assert ours.home is not None
        walk.place = Place.of(ours.home, ours.log.read_text())  # its box has an API server that runs already
    if page == "docs/dashboard.md":
        walk.request = newest_request(ours)
    config = walk.folder / ".config" / "p2pserve"
    for folder in (walk.folder, config):
        folder.mkdir(parents=True, exist_ok=True)
        for name, token in (("worker", "kqTAd"), ("client", "p2p_client_")):
            (folder / f"{name}.token").write_text(walk.place.tokens[token])
            (folder / f"{name}.token").chmod(0o600)
    if page in ("docs/settings.md", "docs/running.md"):
        text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
        (config / "p2pserve.toml").write_text(walk.here(text.split("```toml\n")[1].split("```")[0]))
    offers = json.loads(OFFERS.read_text())
    (walk.folder / "offers.json").write_text(json.dumps(offers[:MAX_OFFERS]))
    (walk.folder / "prompts.txt").write_text("import os\nimport sys\n")
    (walk.folder / "keys.txt").write_text("sk-8c1f0123456789ab name=alice requests_s=2\n")
    (walk.folder / "admin.txt").write_text("0123456789abcdef0123456789abcdef\n")
    (first, *_), (second, *_) = (sorted(network.folder.glob(f"box-{number}/*/events.msgpack")) for number in (0, 1))
    for name, log in (("gateway", first), ("decode", second), ("events", first)):
        shutil.copy(log, walk.folder / f"{name}.msgpack")


def newest_request(server: Server) -> str:
    server.post("/v1/completions", {"model": "bundled", "prompt": "import ", "max_tokens": 2})
    found: str = server.ask("GET", "/p2p/v1/requests?limit=1").json()["data"][0]["id"]
    return found


@pytest.mark.parametrize("example", RUN, ids=str)
def test_an_example_does_what_its_page_says(example: Example, walks: Walks) -> None:
    outcome = walks.outcomes[example]
    assert outcome.code == outcome.expected, outcome.said
    assert outcome.unlike(example) == [], outcome.said


def test_what_stays_ends_in_order(walks: Walks) -> None:
    assert walks.unended == []


def test_what_is_not_run_is_in_the_pages() -> None:
    """And has no second reason."""
    listed = [*ELSEWHERE, *NOT_RUN]
    assert [entry for entry in listed if not any(begins(example, [entry]) for example in EXAMPLES)] == []
    assert [str(example) for example in EXAMPLES if len(begins(example, listed)) > 1] == []
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).exists()] == []


@pytest.mark.parametrize(
    ("shown", "said", "like"),
    [
        ("12 of 12 requests answered in 3.5 s", "8 of 8 requests answered in 900 ms", True),
        ("12 of 12 requests answered in 3.5 s", "8 requests failed", False),
        ('{"object":"list","data":[{"id":"12D...', '{"object":"list","data":[{"id":"x","name":"y"}]}', True),
        ('{"object":"list","data":[{"id":"12D...', '{"object":"list","data":[]}', False),
        ("ok member 203.0.113.7:4001: amber-otter answers", "ok member 127.0.0.1:1: calm-heron answers", True),
        ("ok clock", "failed clock", False),
    ],
)
def test_the_shape_of_a_line(shown: str, said: str, like: bool) -> None:
    assert has_shape(shown, said) is like
