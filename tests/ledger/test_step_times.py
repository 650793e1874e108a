"""The work of a step, where the engine reports now and then how far its requests are, and not after each step."""

from __future__ import annotations

from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.ledger.durations import MAX_PROMPT_REACHES, StepTimes, StepWork
from kvscope.monitor.ledger.records import RequestState


class Engine:
    """Launches and completes steps of requests that began with no computed token."""

    def __init__(self, *prompts: int) -> None:
        self.times, self.step, self.at_ns = StepTimes(), 0, 0
        self.requests = {
            number: RequestState(number, f"r-{number}", Status.RUNNING, prompt_tokens=prompt)
            for number, prompt in enumerate(prompts)
        }

    def launch(self, **tokens: int) -> StepWork:
        """Launch a step of so many tokens of r0, r1 and so on."""
        self.step += 1
        ids = [int(name.removeprefix("r")) for name in tokens]
        self.times.launch(self.step, self.at_ns, ids, [*tokens.values()], self.requests)
        assert self.times.last_work is not None
        return self.times.last_work

    def complete(self) -> None:
        """Complete the oldest step in flight, of which no request is reported."""
        self.at_ns += 1_000_000
        self.times.complete(min(self.times._in_flight), self.at_ns)


def test_a_prompt_is_context_from_the_step_after_it_on() -> None:
    engine = Engine(1000)
    assert engine.launch(r0=1000) == StepWork(1000, 1000, 500_000)
    engine.complete()
    assert engine.launch(r0=1) == StepWork(1, 1001, 0)
    engine.complete()
    assert engine.launch(r0=1).context == 1002


def test_so_it_is_where_steps_are_launched_ahead() -> None:
    engine = Engine(1000, 300)
    engine.launch(r0=1000)
    assert engine.launch(r0=1).context == 1001
    engine.complete()
    assert engine.launch(r0=1, r1=300).context == 1002 + 300
    engine.complete()
    engine.complete()
    assert engine.launch(r0=1, r1=1).context == 1003 + 301


def test_a_chunk_reads_the_chunks_before_it() -> None:
    engine = Engine(1000)
    engine.launch(r0=600)
    engine.complete()
    assert engine.launch(r0=400) == StepWork(400, 1000, 400 * 800)


def test_a_request_that_was_preempted_begins_anew() -> None:
    engine = Engine(1000)
    engine.launch(r0=1000)
    engine.complete()
    engine.requests[0].preemptions += 1
    assert engine.launch(r0=700).context == 700


def test_what_is_reported_counts_as_soon_as_it_includes_the_prompt() -> None:
    engine = Engine(1000)
    engine.launch(r0=1000)
    engine.complete()
    engine.launch(r0=4)
    engine.complete()
    engine.requests[0].computed_tokens, engine.requests[0].output_tokens = 1001, 2  # of four drafts one was right
    assert engine.launch(r0=4).context == 1005


def test_drafts_that_were_wrong_do_not_add_up() -> None:
    engine = Engine(1000)
    record = engine.requests[0]
    record.computed_tokens, record.output_tokens = 1000, 1
    for _ in range(50):
        assert engine.launch(r0=6).context == 1006
        engine.complete()


def test_prompts_of_requests_that_ended_are_forgotten() -> None:
    engine = Engine(*[10] * (MAX_PROMPT_REACHES + 1))
    for number in range(MAX_PROMPT_REACHES):
        engine.launch(**{f"r{number}": 10})
        engine.complete()
        del engine.requests[number]
    engine.launch(**{f"r{MAX_PROMPT_REACHES}": 10})
    assert engine.times._prompts.keys() == {MAX_PROMPT_REACHES}
