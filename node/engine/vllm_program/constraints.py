"""Constrained answers in vLLM's engine: their grammars are compiled beside its steps, and have accepted what another
engine has sampled of an answer before they say what may follow.

vLLM makes tokenizer, threads and grammar backend when an engine starts, or never where it is told to do without a
tokenizer, as ours are. Here they are made when the first constraint comes, on the thread that compiles; what is wrong
with a constraint costs the request that has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING, Any, Final, final

from ..process import explain
from ..vllm.answered import answered_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    from ..sampling import Reasoning, Sampling

BACKEND: Final = "xgrammar"  # vLLM has one in an engine: every box has this one, so that any of them can go on
_THREADS: Final = 1  # grammars of others wait; xgrammar itself takes more of them, and holds no lock of Python's


@final
class ConstraintSupport:
    """The constraints of one engine's requests. Its methods are for the engine's own thread.

    `on_compiled` is called on another thread when a request may go on."""

    def __init__(self, manager: Any, vllm_config: VllmConfig, on_compiled: Callable[[], None]) -> None:
        self._manager = manager  # vLLM's StructuredOutputManager, of which this is the one that it uses
        self._config = vllm_config
        self._on_compiled = on_compiled
        self._threads: ThreadPoolExecutor | None = None
        self._reasoning: dict[str, Reasoning] = {}  # by request, until its grammar is asked for
        self._unseen: set[str] = set()  # requests whose grammar has not accepted what they brought of their answer
        self._failed: dict[str, str] = {}
        self._fill: Any = manager.grammar_bitmask
        # What vLLM's scheduler and core call: the attributes of this one instance.
        self._manager.grammar_init = self._begin
        self._manager.grammar_bitmask = self._fill_after_answered
        self._manager._get_reasoner = _reasoner_of  # noqa: SLF001 (its own knows one parser for all requests)

    def announce(self, request: str, sampling: Sampling) -> None:
        """A request is about to be given to vLLM."""
        if sampling.constraint is not None and sampling.reasoning is not None:
            self._reasoning[request] = sampling.reasoning

    def take_failure(self, request: str) -> str:
        """Why a request cannot have its constraint: told once, empty if it can. It is over then."""
        self._reasoning.pop(request, None)
        self._unseen.discard(request)
        return self._failed.pop(request, "")

    @property
    def failed(self) -> list[str]:
        """Requests whose constraint cannot hold; vLLM may be going on with them."""
        return list(self._failed)

    def close(self) -> None:
        """Compile nothing more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, request: Request) -> None:
        state = request.structured_output_request
        assert state is not None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "grammar")
        self._unseen.add(request.request_id)
        reasoning = self._reasoning.pop(request.request_id, None)
        compiled: Future[Any] = self._threads.submit(self._compile, request, reasoning)
        compiled.add_done_callback(lambda _: self._on_compiled())
        state.grammar = compiled

    def _compile(self, request: Request, reasoning: Reasoning | None) -> StructuredOutputGrammar:
        """On the thread."""
        try:
            self._prepare()
            if reasoning is not None:
                self._add_reasoner(request, reasoning)
            _validate(request)
            grammar: StructuredOutputGrammar = self._manager._create_grammar(request)  # noqa: SLF001 (it is what vLLM submits)
        except Exception as error:
            self._failed[request.request_id] = f"constraint: {explain(error)}"
            raise
        return grammar

    def _prepare(self) -> None:
        if self._manager.backend is not None:
            return
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        model = copy(self._config.model_config)
        model.skip_tokenizer_init = False  # it was for the start alone
        tokenizer, vocabulary = cached_tokenizer_from_config(model), model.get_vocab_size()
        self._manager.tokenizer = tokenizer
        self._manager.backend = XgrammarBackend(self._config, tokenizer=tokenizer, vocab_size=vocabulary)

    def _add_reasoner(self, request: Request, reasoning: Reasoning) -> None:
        from vllm.reasoning import ReasoningParserManager

        if reasoning.parser not in ReasoningParserManager.list_registered():
            raise ValueError(f"{reasoning.parser} is no reasoning parser of this vLLM")
        arguments = json.loads(reasoning.arguments) if reasoning.arguments else {}
        state = request.structured_output_request
        assert state is not None
        parser = ReasoningParserManager.get_reasoning_parser(reasoning.parser)
        state.reasoner = parser(self._manager.tokenizer, **arguments)
        state.reasoning_ended = reasoning.ended

    def _fill_after_answered(self, requests: dict[str, Request], ids: list[str], drafts: dict[str, list[int]]) -> Any:
        """What vLLM does before each step with constraints; it is the first moment when nothing more can be told of the
        beginning of an answer."""
        for request in self._unseen.intersection(ids):
            self._unseen.discard(request)
            answered = answered_tokens(requests[request])
            if answered and not self._manager.accept_tokens(requests[request], answered):
                self._failed[request] = "constraint: the answer so far is not what it allows"
        return self._fill(requests, ids, drafts)


def _reasoner_of(request: Request) -> Any:
    state = request.structured_output_request
    return state.reasoner if state is not None else None


def _validate(request: Request) -> None:
    """What vLLM's front end does, whom no peer has to have asked. Raises its errors."""
    from vllm.sampling_params import check_json_nesting
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    sampling = request.sampling_params
    assert sampling is not None
    params = sampling.structured_outputs
    assert params is not None
    for field in ("json", "grammar", "structural_tag"):
        text = getattr(params, field)
        if text is not None and not text.strip():
            raise ValueError(f"{field} is empty")
    if params.choice is not None and not params.choice:
        raise ValueError("choice is empty")
    check_json_nesting(params.json)
    check_json_nesting(params.structural_tag, structural_tag=True)
    validate_xgrammar_grammar(sampling)
