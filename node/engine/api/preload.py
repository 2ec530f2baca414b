"""Imported by a fork server, for the API processes that it is to fork: all that they would import themselves."""

from __future__ import annotations

import contextlib
import importlib
from typing import Final

from . import mounts, process, vllm_front  # noqa: F401  (imported for the children)

_IMPORTED_LATE: Final = (
    "anyio._backends._asyncio",
    "model_hosting_container_standards.sagemaker",
    "pydantic.v1",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.entrypoints.scale_out.factories",
)
"""What vLLM and uvicorn import only when a server starts."""

for _name in _IMPORTED_LATE:
    with contextlib.suppress(ImportError):  # each child would find that out for itself
        importlib.import_module(_name)
