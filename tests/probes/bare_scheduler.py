"""vLLM's own Scheduler with the probe on it, without a server and without a model: run by a Python that has vLLM.

    PYTHONPATH=. PYTHON -m tests.probes.bare_scheduler MODEL_DIRECTORY OUT '{"LIFE": {"steps": 2000, …}, …}'

It leads random lives: shared prefixes, a pool too small for all, aborts, resets; with a connector also fetches and
blocks that outlive their request. After each call of schedule or update_from_output, or after each `every` of them, it
writes to OUT/LIFE what the probe said and what vLLM's tables hold, each as a msgpack map after its length, of four
bytes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvscope.lab.on_vllm.cache_groups import cache_config, takes
from kvscope.lab.on_vllm.scheduler_maker import configured, scheduler_of
from tests.probes.random_load import LOADS
from tests.probes.run_record import RunRecord, unhooked_afterwards


def traceparent(number: int) -> str:
    """The header that the `number`-th request comes with, if it comes with one."""
    return f"00-{number:032x}-{number:016x}-01"


class Bare:
    """A scheduler over `blocks` blocks, and what stands in for the model and for the connector's worker."""

    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        blocks: int = 120,
        block_size: int = 32,
        groups: tuple[tuple[Any, ...], ...] = (("full",),),
        max_num_seqs: int = 16,
        max_tokens: int = 512,
        a_step_ahead: bool = False,
        preempts_within: bool = False,
        loras: int = 0,
        drafts: int = 0,
        image_tokens: int = 0,
        failing_loads: bool = False,
        resets: float = 0.003,
        own_pool: bool = False,
        loads: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        self.rng = random.Random(seed)
        if drafts:
            settings["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": drafts,
                "prompt_lookup_max": drafts,
            }
        config = configured(model, block_size, max_num_seqs, max_tokens, groups, loras, **settings)
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = a_step_ahead  # vLLM itself never has it on the CPU
        self.scheduler, self.hasher = scheduler_of(config, cache_config(groups, blocks, block_size, drafts))
        self.ahead = 2 if a_step_ahead else 1
        self.preempts_within = preempts_within
        self.loras = loras
        self.drafts = drafts
        self.image_tokens = image_tokens
        self.failing_loads = failing_loads
        self.resets = resets
        self.structured = False
        self.pinned: list[Any] = []
        self.in_flight: deque[Any] = deque()
        self.sending: list[tuple[int, str]] = []
        self.receiving: dict[str, int] = {}
        self.steps = 0
        self.arrived = 0
        self._read_release()
        if image_tokens:
            self._encode(image_tokens)
        if own_pool:
            self._separate(blocks)
        self.prefixes = [self.tokens(200) for _ in range(4)]
        self.loads = [LOADS[name]() for name in ("aborts", "resets", *loads)]
        for load in self.loads:
            load.start(self)

    def _read_release(self) -> None:
        """What differs between releases of vLLM."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        self.takes_arrays = "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"])  # 0.11.1 to 0.12
        self.reports_chunks = "is_prefill_chunk" in inspect.getsource(Request)

    def _encode(self, tokens: int) -> None:
        """As if the model had an encoder, which takes so many tokens a step."""
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

        self.scheduler.max_num_encoder_input_tokens = tokens
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=2 * tokens)

    def _separate(self, blocks: int) -> None:
        """Give the last KV cache group a pool of its own, as for blocks in host memory, where the release has that."""
        from vllm.v1.core.block_pool import BlockPool

        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[-1]
        pool = BlockPool(4 * blocks, False, **takes(BlockPool, hash_block_size=manager.block_size))
        if hasattr(pool.blocks[0], "pool"):
            for block in pool.blocks:
                block.pool = pool
            manager.block_pool, manager._null_block = pool, pool.null_block

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 300) for _ in range(count)]

    def arrive(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        *,
        part: bool | None = None,
        whole_name: bool = False,
    ) -> str:
        """A request; vLLM's id for it. part: more of a session's prompt follows, or, if false, no more."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        self.arrived += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **self._structure(part))
        params.update_from_generation_config({}, 2)
        of_releases = takes(
            Request,
            eos_token_id=2,
            multi_modal_kwargs=None,
            multi_modal_hashes=None,
            multi_modal_placeholders=None,
            mm_features=self._images(prompt),
            resumable=bool(part),
        )
        request = Request(
            request_id=name if whole_name else f"{name}-{self.rng.randrange(1 << 32):08x}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            block_hasher=self.hasher,
            **of_releases,
        )
        self._expect_structure(request)
        if self.loras and self.arrived % 2:
            request.lora_request = LoRARequest(f"l{self.arrived % 5}", 1 + self.arrived % 5, "/nowhere")
        if self.arrived % 3 == 0 and not whole_name:
            request.trace_headers = {"traceparent": traceparent(self.arrived)}
        self.scheduler.add_request(request)
        return str(request.request_id)

    def _structure(self, part: bool | None) -> dict[str, Any]:
        """A third of the requests want output of a structure, if any do."""
        if not self.structured or part is not None or self.arrived % 3:
            return {}
        from vllm import sampling_params

        if hasattr(sampling_params, "StructuredOutputsParams"):
            return {"structured_outputs": sampling_params.StructuredOutputsParams(regex="a")}
        return {"guided_decoding": sampling_params.GuidedDecodingParams(regex="a")}

    def _expect_structure(self, request: Any) -> None:
        """Early releases have it from the processor."""
        if request.status.name == "WAITING_FOR_FSM" and request.structured_output_request is None:
            from vllm.v1.structured_output.request import StructuredOutputRequest

            request.structured_output_request = StructuredOutputRequest(sampling_params=request.sampling_params)

    def _images(self, prompt: list[int]) -> list[Any]:
        """Half of the requests have an image or two in their prompt, if any do."""
        if not self.image_tokens or self.arrived % 2 or len(prompt) < 60:
            return []
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        length = self.rng.randrange(8, 40)
        offsets = [self.rng.choice((0, 0, self.rng.randrange(0, len(prompt) - length)))]
        return [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=f"image-{self.arrived}-{offset}",
                mm_position=PlaceholderRange(offset=offset, length=length),
            )
            for offset in offsets
        ]

    def someone(self) -> None:
        """A request as the load has them."""
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.randrange(1, 201)] + self.tokens(rng.randrange(1, 250))
        what = rng.choice(("keep", "load", "r", "r")) if self.arrived % 8 == 0 else rng.choice(("load", "r", "r"))
        if self.arrived % 7 == 0 and self.scheduler.connector is not None:
            what = "slow"
        self.arrive(f"{what}-{self.arrived}", prompt, rng.randrange(1, 120), rng.randrange(3))

    def schedule(self) -> Any:
        requests = self.scheduler.requests
        ends = {i: r.num_tokens + r.num_output_placeholders for i, r in requests.items() if not self.reports_chunks}
        output = self.scheduler.schedule()
        # A token comes of a step that brings a request to its end.
        partial = {
            i
            for i in output.num_scheduled_tokens
            if (requests[i].is_prefill_chunk if self.reports_chunks else requests[i].num_computed_tokens < ends[i])
        }
        self.in_flight.append((output, partial))
        for request_id in output.finished_req_ids:
            if "keep" not in request_id:
                self.sending.append((self.steps + self.rng.randrange(1, 4), request_id))
        return output

    def update(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self.steps += 1
        output, partial = self.in_flight.popleft()
        request_ids = list(output.num_scheduled_tokens)
        drafted = output.scheduled_spec_decode_tokens
        sampled: list[Any] = [
            [] if i in partial else self.tokens(1 + self._accepted(drafted.get(i, ()))) for i in request_ids
        ]
        if self.takes_arrays:
            sampled = [np.array(tokens, dtype=int) for tokens in sampled]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={r: i for i, r in enumerate(request_ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=self._transfers() if self.scheduler.connector is not None else None,
                **takes(ModelRunnerOutput, spec_token_ids=None),
            ),
        )
        if self.drafts:
            self._draft([i for i in request_ids if i not in partial])

    def _accepted(self, drafts: Sequence[int]) -> int:
        """How many of the drafts the model accepts: none of those that vLLM put there to fill a step."""
        real = [token for token in drafts if token >= 0]
        return self.rng.randrange(len(real) + 1) if real else 0

    def _draft(self, request_ids: list[str]) -> None:
        from vllm.v1.outputs import DraftTokenIds

        drafts = [self.tokens(self.rng.randrange(self.drafts + 1)) for _ in request_ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(request_ids, drafts))

    def _transfers(self) -> Any:
        """The report of the connector's worker."""
        from vllm.v1.outputs import KVConnectorOutput

        requests = self.scheduler.requests
        sent = {i for due, i in self.sending if due <= self.steps}
        self.sending = [(due, i) for due, i in self.sending if i not in sent]
        for request in requests.values():
            fetched = request.request_id in self.scheduler.finished_recving_kv_req_ids
            if request.status.name == "WAITING_FOR_REMOTE_KVS" and not fetched:
                self.receiving.setdefault(request.request_id, self.steps + self.rng.randrange(1, 6))
        received = {i for i, due in self.receiving.items() if due <= self.steps}
        for request_id in received:
            del self.receiving[request_id]
        # One that was aborted while it was fetched is reported once, by its fetch.
        sent -= received | self.receiving.keys()
        return KVConnectorOutput(
            finished_sending={i for i in sent if i in requests} or None,
            finished_recving=received or None,
            **(takes(KVConnectorOutput, invalid_block_ids=self._invalid(received)) if self.failing_loads else {}),
        )

    def _invalid(self, received: set[str]) -> set[int]:
        """Blocks of some loads that have failed."""
        requests, manager = self.scheduler.requests, self.scheduler.kv_cache_manager
        invalid = set()
        for request_id in sorted(received):
            if request_id in requests and not requests[request_id].is_finished() and self.rng.random() < 0.4:
                (blocks,) = manager.get_block_ids(request_id)
                invalid.add(blocks[self.rng.randrange(len(blocks) // 2, len(blocks))])
        return invalid

    def live(self) -> None:
        """What happens between two passes of a random run."""
        if len(self.scheduler.requests) < 60 and self.rng.random() < 0.4:
            self.someone()
        for load in self.loads:
            load.before_pass()


def main() -> None:
    model, out, random_runs = sys.argv[1:]
    for life, settings in json.loads(random_runs).items():
        steps, every = settings.pop("steps"), settings.pop("every", 1)
        bare = Bare(model, **settings)
        within = preempting_within(bare.scheduler) if bare.preempts_within else contextlib.nullcontext()
        with (Path(out) / life).open("wb") as file, within, unhooked_afterwards(bare.scheduler):
            record(bare, steps, every, file)


@contextlib.contextmanager
def preempting_within(scheduler: Any) -> Iterator[None]:
    """As in releases up to 0.11, whose schedulers have no method to preempt, and so none that can be wrapped."""
    method = getattr(type(scheduler), "_preempt_request", None)
    if method is None:
        yield
        return
    scheduler._preempt_request = functools.partial(method, scheduler)
    del type(scheduler)._preempt_request
    yield
    type(scheduler)._preempt_request = method


def record(bare: Bare, steps: int, every: int, file: BinaryIO) -> None:
    written = RunRecord(bare.scheduler, file, every)
    while bare.steps < steps or not written.is_audited():
        bare.live()
        while len(bare.in_flight) < bare.ahead:
            with written.decisions.traced():
                bare.schedule()
            written.write(after_schedule=True)
        bare.update()
        written.write()


if __name__ == "__main__":
    main()
