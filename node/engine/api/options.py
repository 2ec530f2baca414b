"""vLLM's own flags, and what becomes of each here: passed to its API server, ours, or refused with what to do instead.

Of vLLM 0.32. A release with another flag fails a test that compares this with vLLM's parser. Neither torch nor vLLM is
needed: the command line reads this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

PASSED: Final[dict[str, bool]] = {
    "--chat-template": True,
    "--chat-template-content-format": True,
    "--trust-request-chat-template": False,
    "--default-chat-template-kwargs": True,
    "--response-role": True,
    "--return-tokens-as-token-ids": False,
    "--enable-auto-tool-choice": False,
    "--exclude-tools-when-tool-choice-none": False,
    "--tool-call-parser": True,
    "--tool-parser-plugin": True,
    "--tool-strict-level": True,
    "--max-log-len": True,
    "--enable-prompt-tokens-details": False,
    "--enable-per-request-metrics": False,
    "--enable-server-load-tracking": False,
    "--enable-force-include-usage": False,
    "--sse-keep-alive-interval": True,
    "--enable-tokenizer-info-endpoint": False,
    "--enable-log-outputs": False,
    "--enable-log-deltas": False,
    "--cohere-is-reasoning-model": False,
    "--cohere-format": True,
    "--anthropic-disabled-thinking-effort": True,
    "--log-error-stack": False,
    "--fingerprint-mode": True,
    "--fingerprint-value": True,
    "--allow-credentials": False,
    "--allowed-origins": True,
    "--allowed-methods": True,
    "--allowed-headers": True,
    "--root-path": True,
    "--disable-fastapi-docs": False,
    "--enable-offline-docs": False,
    "--enable-log-requests": False,
    "--disable-log-stats": False,
    "--reasoning-parser": True,
    "--reasoning-parser-plugin": True,
    "--generation-config": True,
    "--override-generation-config": True,
    "--max-logprobs": True,
    "--tokenizer-mode": True,
    "--show-hidden-metrics-for-version": True,
    "--stream-interval": True,
    "--renderer-num-workers": True,
}
"""Flag -> whether a value follows. Those without one also have the form `--no-...`, where vLLM has it."""

ONE_SIDED: Final = frozenset({"--disable-log-stats"})
"""Switches without a `--no-` form."""

FILES: Final = frozenset({"--chat-template", "--tool-parser-plugin", "--reasoning-parser-plugin"})
"""Flags whose value is a path. That of a template may be the template itself, which has braces."""

OURS: Final[dict[str, str]] = {
    "--model": "the model is the first argument: p2pserve serve MODEL",
    "--host": "--http HOST:PORT says where to listen",
    "--port": "--http HOST:PORT says where to listen",
    "--api-key": "",
    "--served-model-name": "",
    "--max-model-len": "",
    "--dtype": "",
    "--kv-cache-dtype": "",
    "--max-num-batched-tokens": "",
    "--tensor-parallel-size": "--tp says how many GPUs of this box share a layer",
    "--max-num-seqs": "--max-requests says how many run at once",
    "--kv-cache-memory-bytes": "--kv-cache-mib says how large the KV cache is",
    "--gpu-memory-utilization": "--memory-gib says how much memory is for weights and KV",
    "--async-scheduling": "",
    "--enable-request-id-headers": "every answer has X-Request-Id; leave it out",
}
"""Flags that p2pserve has under the same name, or (with text) in another form."""

_REFUSED: Final[tuple[tuple[str, str], ...]] = (
    (
        "it starts vLLM's server in another form; this one is a process of the node",
        (
            "--headless --api-server-count --config --grpc --aggregate-engine-logging "
            "--fail-on-environ-validation --shutdown-timeout --gdn-prefill-backend --kda-prefill-backend "
            "--kda-decode-backend"
        ),
    ),
    (
        "this network serves one set of weights for each model; merge the adapter into them",
        (
            "--lora-modules --enable-lora --max-loras --max-lora-rank --lora-dtype --enable-tower-connector-lora "
            "--max-cpu-loras --fully-sharded-loras --lora-target-modules --default-mm-loras "
            "--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras "
            "--max-lora-cls-labels"
        ),
    ),
    (
        "it belongs to a server of vLLM's own; leave it out",
        (
            "--trust-request-mm-kwargs --tokens-only --enable-scale-out --grpc-port "
            "--data-parallel-supervisor-port --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s "
            "--dp-supervisor-probe-failure-threshold --uvicorn-log-level --disable-uvicorn-access-log "
            "--disable-access-log-for-endpoints --h11-max-incomplete-event-size --h11-max-header-count "
            "--enable-flash-late-interaction"
        ),
    ),
    (
        "tools of a server run code on this box; let the client run them",
        "--tool-server",
    ),
    (
        "--http HOST:PORT says where to listen; a Unix socket is not served",
        "--uds",
    ),
    (
        ("put a proxy with TLS in front, like Caddy, or use `p2pserve gateway`: the network's sessions are encrypted"),
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs --enable-ssl-refresh --ssl-cert-reqs --ssl-ciphers",
    ),
    (
        "it runs code in the node's API process; put a proxy in front",
        "--middleware",
    ),
    (
        "the network's boxes load the model, and have to agree on it; leave it out",
        (
            "--runner --convert --seed --hf-config-path --allowed-local-media-path --allowed-media-domains "
            "--revision --code-revision --tokenizer-revision --quantization-config "
            "--allow-deprecated-quantization --enforce-eager --enable-return-routed-experts "
            "--return-sampling-mask --logprobs-mode --use-fp64-gumbel --enable-trace-replay "
            "--disable-sliding-window --disable-cascade-attn --skip-tokenizer-init --enable-prompt-embeds "
            "--config-format --hf-overrides --model-class-overrides --pooler-config --enable-sleep-mode "
            "--sleep-mode-offload-cudagraph --sleep-preserve-parameter-names --enable-cumem-allocator "
            "--enable-nccl-comm-suspend --model-impl --io-processor-plugin"
        ),
    ),
    (
        "the network's boxes load the model and its tokenizer from one folder; put the tokenizer there",
        "--tokenizer",
    ),
    (
        "code that comes with a model is not run; take a model that vLLM knows",
        "--trust-remote-code",
    ),
    (
        "the model's own configuration says how it is quantised; leave it out",
        "--quantization",
    ),
    (
        "set HF_TOKEN",
        "--hf-token",
    ),
    (
        "it runs code in engines of other boxes; leave it out",
        "--logits-processors",
    ),
    (
        "p2pserve fetches and loads the weights; leave it out",
        (
            "--load-format --download-dir --safetensors-load-strategy --safetensors-prefetch-num-threads "
            "--safetensors-prefetch-block-size --model-loader-extra-config --ignore-patterns --use-tqdm-on-load "
            "--pt-load-map-location"
        ),
    ),
    (
        "each box's engine chooses its kernels; leave it out",
        (
            "--attention-backend --mamba-backend --mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding "
            "--mamba-cache-philox-rounds --ir-op-priority --enable-flashinfer-autotune --moe-backend "
            "--linear-backend --sparse-indexer-topk-backend"
        ),
    ),
    (
        "the plan says how boxes share the model (`p2pserve plan --live`), --tp how the GPUs of one do",
        (
            "--distributed-executor-backend --pipeline-parallel-size --master-addr --master-port --nnodes "
            "--node-rank --distributed-timeout-seconds --cpu-distributed-timeout-seconds --numa-bind "
            "--numa-bind-nodes --numa-bind-cpus --device-ids --decode-context-parallel-size --dcp-comm-backend "
            "--dcp-q-replicate --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size "
            "--prefill-context-parallel-size --data-parallel-size --data-parallel-rank --data-parallel-start-rank "
            "--data-parallel-size-local --data-parallel-address --data-parallel-rpc-port --data-parallel-backend "
            "--data-parallel-hybrid-lb --data-parallel-external-lb --data-parallel-multi-port-external-lb "
            "--enable-hc-sp --enable-expert-parallel --enable-batch-sharded-sampling --enable-ep-weight-filter "
            "--all2all-backend --enable-dbo --enable-shm-tensor-arena --ubatch-size --enable-elastic-ep "
            "--elastic-ep-max-dp-size --dbo-decode-token-threshold --dp-sync-interval "
            "--dbo-prefill-token-threshold --disable-nccl-for-dp-synchronization --enable-eplb --eplb-config "
            "--expert-placement-strategy --max-parallel-loading-workers --ray-workers-use-nsight "
            "--disable-custom-all-reduce --worker-cls --worker-extension-cls --enable-fault-tolerance "
            "--fault-tolerance-config"
        ),
    ),
    (
        "each box's engine sizes and lays out its KV cache (--kv-cache-mib); leave it out",
        (
            "--block-size --num-gpu-blocks-override --enable-prefix-caching "
            "--prefix-caching-hash-algo --prefix-cache-retention-interval --kv-cache-dtype-skip-layers "
            "--kv-sharing-fast-prefill --swa-bounded-replay --mamba-cache-dtype --mamba-ssm-cache-dtype "
            "--mamba-block-size --prefix-match-unit --mamba-cache-mode --enable-mamba-shared-prefix-checkpoint "
            "--replayssm-buffer-len --use-replayssm --kv-offloading-size --kv-offloading-backend"
        ),
    ),
    (
        "weights and KV stay on the GPUs here; leave it out",
        (
            "--offload-backend --cpu-offload-gb --cpu-offload-params --offload-group-size --offload-num-in-group "
            "--offload-prefetch-step --offload-params"
        ),
    ),
    (
        "this network takes text and tokens, no images",
        (
            "--language-model-only --limit-mm-per-prompt --enable-mm-embeds --media-io-kwargs "
            "--mm-processor-kwargs --mm-processor-cache-gb --mm-processor-cache-type --mm-hasher-algorithm "
            "--mm-shm-cache-max-object-size-mb --mm-encoder-only --mm-encoder-tp-mode --mm-encoder-attn-backend "
            "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path "
            "--mm-encoder-fp8-scale-save-margin --interleave-mm-strings --skip-mm-profiling --video-pruning-rate "
            "--video-pruning-method --mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb "
            "--mm-device-do-normalize"
        ),
    ),
    (
        "the log is api.log in the node's folder; leave it out",
        "--logging-config --log-level --log-config-file",
    ),
    (
        "the network has traces and metrics of its own (docs/seeing.md); leave it out",
        (
            "--otlp-traces-endpoint --collect-detailed-traces --per-request-spec-decode-metrics "
            "--kv-cache-metrics --kv-cache-metrics-sample --custom-histogram-buckets --cudagraph-metrics "
            "--enable-layerwise-nvtx-tracing --enable-mfu-metrics --enable-logging-iteration-details "
            "--jit-monitor-mode --jit-monitor-verbose"
        ),
    ),
    (
        "the plan and each box's engine schedule (--max-num-batched-tokens, --max-requests); leave it out",
        (
            "--max-num-scheduled-tokens --max-num-active-seqs --max-num-queued-reqs --max-num-queued-tokens "
            "--long-prefill-token-threshold --long-prefill-token-threshold-adaptive --scheduling-policy "
            "--enable-chunked-prefill --disable-chunked-mm-input --scheduler-cls --scheduler-reserve-full-isl "
            "--watermark --prefill-schedule-interval --disable-hybrid-kv-cache-manager"
        ),
    ),
    (
        "each box's engine decides what it compiles; leave it out",
        "--cudagraph-capture-sizes --max-cudagraph-capture-size",
    ),
    (
        "engines do not speculate here yet; leave it out",
        "--speculative-config",
    ),
    (
        "it configures an engine; each box's engine is configured by its node; leave it out",
        (
            "--spec-method --spec-model --spec-tokens --watermark-config --diffusion-config --kv-events-config "
            "--ec-transfer-config --ec-manager-config --compilation-config --attention-config --engram-config "
            "--reasoning-config --kernel-config --additional-config --aux-output-config --profiler-config "
            "--optimization-level --performance-mode --weight-transfer-config"
        ),
    ),
    (
        "KV moves by the plan (docs/paths.md); leave it out",
        "--kv-transfer-config",
    ),
    (
        "constraints are checked by xgrammar everywhere; --reasoning-parser is passed",
        "--structured-outputs-config",
    ),
)
REFUSED: Final = {flag: reason for reason, flags in _REFUSED for flag in flags.split()}
"""Flags that cannot hold here -> what to do instead."""

ALIASES: Final = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}


class OptionRefused(ValueError):
    """A flag that is not passed to vLLM. The text names it, and says what to do instead."""


def check_options(given: Sequence[str]) -> tuple[str, ...]:
    """The flags to pass, each with its values, from what is left of a command line. Raises OptionRefused."""
    at = 0
    while at < len(given):
        word, equals, _ = given[at].partition("=")
        if not word.startswith("-"):
            raise OptionRefused(f"{word[:80]}: this is no option, and the model is named already")
        takes_value = _judge(word)
        at += 1
        if takes_value and not equals:
            if at == len(given):
                raise OptionRefused(f"{word}: a value is missing")
            at += 1
    return tuple(given)


def write_flag(name: str, value: object) -> tuple[str, ...]:
    """A flag and its value, as a file has them, as they stand on a command line: true is the flag alone, false its
    `--no-` form where there is one, and what is neither text nor a number is written as JSON. Raises OptionRefused."""
    flag = f"--{name}"
    if OURS.get(flag) == "":
        raise OptionRefused(f"{flag}: it is an option of p2pserve, too; write it outside of the table, as {name}")
    takes_value = _judge(flag)
    if isinstance(value, bool) is takes_value:
        raise OptionRefused(f"{flag}: it takes a value" if takes_value else f"{flag}: it is true or false")
    if not takes_value:
        return (flag,) if value else () if flag in ONE_SIDED else (f"--no-{name}",)
    return (f"{flag}={value if isinstance(value, str) else json.dumps(value, default=str)}",)


def flag_of(word: str) -> str:
    """What a word of a command line says for or against: `--a=b`, `--no-a` and `--a` are of one flag."""
    flag = word.partition("=")[0].replace("_", "-")
    return f"--{flag.removeprefix('--no-').removeprefix('--')}"


def _judge(word: str) -> bool:
    """Whether a value follows this flag. Raises OptionRefused for one that is not passed."""
    flag = word if word.startswith("--no-") else word.replace("_", "-")
    flag = ALIASES.get(flag, flag)
    plain = f"--{flag.removeprefix('--no-')}"
    if flag in PASSED:
        return PASSED[flag]
    if plain in PASSED and not PASSED[plain] and plain not in ONE_SIDED:
        return False
    for table in (REFUSED, OURS):
        reason = table.get(flag) or table.get(plain)
        if reason:
            raise OptionRefused(f"{word[:80]}: {reason}")
    near = get_close_matches(flag, [*PASSED, *OURS], n=1)
    raise OptionRefused(f"{word[:80]}: no such option" + (f"; did you mean {near[0]}?" if near else ""))
