"""Mutants that change nothing that can be seen: by module, function, line of source and change, the proof."""

from __future__ import annotations

from typing import Final

_FINDINGS: Final = "kvscope.monitor.detectors.findings"
_RULES: Final = "kvscope.monitor.detectors"

ACCEPTED_MUTANTS: Final[dict[tuple[str, str, str, str], str]] = {
    (
        _FINDINGS,
        "Findings.__init__",
        "self._known_until_ns = 0",
        "0 -> 1",
    ): "no place is known before remember(), which sets both",
    (
        _FINDINGS,
        "Findings.update",
        "if finding is not None and 0 < finding.last_seen_ns <= epoch_ns and not finding.outlasts_epoch:",
        "0 -> 1",
    ): "a wall clock in ns since 1970 is never 1",
    (
        _FINDINGS,
        "Findings.update",
        'settles = finding.state == "firing" and not 0 < finding.last_seen_ns <= epoch_ns',
        "0 -> 1",
    ): "a wall clock in ns since 1970 is never 1",
    (
        _FINDINGS,
        "Findings.update",
        "until_ns = now_ns if observer else min(now_ns, last_received_ns or 0)",
        "0 -> 1",
    ): "without last_received_ns, observer is true and this is not evaluated",
    (
        _FINDINGS,
        "Findings.update",
        "until_ns = now_ns if observer else min(now_ns, last_received_ns or 0)",
        "last_received_ns or 0 -> last_received_ns",
    ): "without last_received_ns, observer is true and this is not evaluated",
    (
        _FINDINGS,
        "finding_order",
        "severity = 0 if rank else -SEVERITIES.index(finding.severity)",
        "0 -> 1",
    ): "it is compared only among findings of one rank other than 0, which all have it",
    (
        _FINDINGS,
        "Finding.__init__",
        "self.unseen_until_ns = 0",
        "0 -> 1",
    ): "judge() sets it to 0 before the finding can fire, and no time is before 1 ns",
    (
        _FINDINGS,
        "Finding.__init__",
        "self.explained_ns = 0",
        "0 -> 1",
    ): "it is read only of suppressed findings, and suppressing sets it",
    (
        _FINDINGS,
        "Finding._take",
        "if not alike and len(self._requests) < MAX_KEPT_CULPRITS:",
        "not alike and len(self._requests) < MAX_KEPT_CULPRITS -> len(self._requests) < MAX_KEPT_CULPRITS",
    ): "requests like the last ones are in it already, so that adding them again changes nothing",
    (
        _FINDINGS,
        "Findings.by_id",
        "known = (*self.firing(), *self.set_aside_since(0), *self.resolved(), *others)",
        "0 -> 1",
    ): "a wall clock in ns since 1970 is never below 1",
    (
        f"{_RULES}.stuck.head_of_line",
        "_admits_nothing",
        "admitted = (after.running or 0) - (before.running or 0) + moved(before.finished, after.finished)",
        "0 -> 1",
    ): "requests run in both samples: _waits_beside_room was true of either",
    (
        f"{_RULES}.blind.metric_wrong",
        "impossible_usage",
        'value = number_of(lines[0], "value") or 0.0',
        "0.0 -> 1.0",
    ): "a line without a value, or with 0, is within bounds and not among the lines",
    (
        f"{_RULES}.preemptions",
        "counted_preemptions",
        "ended = (last.finished or 0) - (first.finished or 0) + (last.aborted or 0) - (first.aborted or 0)",
        "first.finished or 0 -> first.finished",
    ): "a sample without it ends the window before it",
    (
        f"{_RULES}.leak.held_by_usage",
        "_overfull",
        "if not fit or fit < 1:",
        "not fit or fit < 1 -> not fit",
    ): "with room for less than one request, no usage up to 1 exceeds the one that runs",
    (
        f"{_RULES}.stuck.head_of_line",
        "UnadmittedQueue.seconds",
        "return apart_s(self.samples[0], self.samples[-1]) or 0.0",
        "apart_s(self.samples[0], self.samples[-1]) or 0.0 -> apart_s(self.samples[0], self.samples[-1])",
    ): "_waits_beside_room was true of both samples, so that they have times",
    (
        f"{_RULES}.sizing.overload",
        "Overload._is_overload",
        "at_once = max(sample.running or 0 for sample in course.samples)",
        "sample.running or 0 -> sample.running",
    ): "_queued_at_end keeps no sample without the number of running requests",
    (
        f"{_RULES}.sizing.memory_figures",
        "_of_event",
        'if not {"device_total", "device_free", "kv_pool", "graphs_actual"} <= known.keys():',
        "{'device_total', 'device_free', 'kv_pool', 'graphs_actual'} <= known.keys()"
        " -> {'device_total', 'device_free', 'kv_pool', 'graphs_actual'} < known.keys()",
    ): "where the device's memory is known, measured() adds `elsewhere`, so the four are never all",
    (
        f"{_RULES}.preemptions",
        "counted_preemptions",
        "if len(window) <= FEWEST_SAMPLES or (apart_s(window[0], window[-1]) or 0) < settings(COUNT_WINDOW_S):",
        "len(window) <= FEWEST_SAMPLES or (apart_s(window[0], window[-1]) or 0) < settings(COUNT_WINDOW_S)"
        " -> (apart_s(window[0], window[-1]) or 0) < settings(COUNT_WINDOW_S)",
    ): "of three samples or fewer, the first of the three parts begins and ends with the same one",
    (
        f"{_RULES}.blind.metric_wrong",
        "impossible_usage",
        'value = number_of(lines[0], "value") or 0.0',
        "number_of(lines[0], 'value') or 0.0 -> number_of(lines[0], 'value')",
    ): "a line without a value, or with 0, is within bounds and not among the lines",
    (
        f"{_RULES}.written.lost_blocks",
        "pins_kept",
        'items = number_of(full[-1], "items") or 0',
        "0 -> 1",
    ): "lines without a number of items are left out before",
    (
        f"{_RULES}.imbalance.unequal_ranks",
        "UnequalRanks.detect",
        "if idle and not any(other.engine < ledger.engine for other in full):",
        "other.engine < ledger.engine -> other.engine <= ledger.engine",
    ): "the others are siblings, of which none has this engine's name",
    (
        f"{_RULES}.stuck.slots_exhausted",
        "SlotsExhausted.read",
        'missing = (number_of(line, "total") or 0) - (number_of(line, "available") or 0)',
        "0 -> 1",
    ): "the pattern of the line matches none without both numbers",
    (
        f"{_RULES}.sizing.refused_start",
        "_lacks",
        "or (free is not None and desired is not None and free < desired)",
        "free is not None and desired is not None and (free < desired) -> free is not None and free < desired",
    ): "the one refusal with the device's free memory states the desired memory in the same sentence",
    (
        f"{_RULES}.sizing.refused_start",
        "_lacks",
        '"pool_blocks" in line.fields and (number_of(line, "pool_blocks") or 0) <= 0',
        "0 -> 1",
    ): "of the two, the bound alone survives: the pattern matches no number of blocks above 0",
    (
        f"{_RULES}.written.pool_pressure",
        "prefix_never_hit",
        'asked, found = number_of(queries[-1], "value") or 0, number_of(hits[-1], "value") or 0',
        "number_of(hits[-1], 'value') or 0 -> number_of(hits[-1], 'value')",
    ): "it is only asked whether there were any, which None and 0 answer alike",
    (
        f"{_RULES}.leak.deferred_blocks",
        "overdue_when_polled",
        "polled_ns = (beat.at_ns if beat is not None else 0) - ledger.unpolled_s() * 1e9",
        "0 -> 1",
    ): "a nanosecond after the clock's beginning, nothing has been kept for long either",
    (
        "kvscope.monitor.ledger.retained_blocks",
        "_buckets",
        "LifetimeBucket(bound, after - before)"
        " for bound, (before, after) in zip(bounds, pairwise(counts), strict=True)",
        "True -> False",
    ): "counts has one entry more than bounds, so that both sides have the same length",
    (
        "kvscope.monitor.ledger.request_latency",
        "recent_sample_latency",
        "if (sample.at_ns or 0) <= since_ns:",
        "0 -> 1",
    ): "since_ns is minutes before a wall clock in ns since 1970, or below 0 where that is not known",
    (
        "kvscope.monitor.ledger.event_history",
        "EventFilter.may_match",
        "if self.request is None and self.block is None:",
        "self.request is None and self.block is None -> self.block is None",
    ): "it only spares a walk: more batches pass, and each event of those is examined",
    (
        "kvscope.monitor.ledger.event_history",
        "EventFilter.may_match",
        "if self.request is None and self.block is None:",
        "self.request is None -> self.request is not None",
    ): "it only spares a walk: the last line is true without either, and with a request more batches pass",
    (
        "kvscope.monitor.ledger.engine_ledger",
        "EngineLedger._heartbeat_received",
        "wall_ns = self.wall(last.at_ns) if last is not None else 0",
        "0 -> 1",
    ): "without a heartbeat, add() returns before it uses the time",
    (
        "kvscope.monitor.ledger.durations",
        "_fit",
        "weights = [1 / seconds**2 for _, seconds in rows]",
        "1 -> 2",
    ): "least squares are the same if all weights are doubled, to the last bit",
    (
        "kvscope.monitor.probes.vllm.front_end_hooks",
        "FrontEndReporter._connect",
        "socket.setsockopt(zmq.LINGER, 0)",
        "0 -> 1",
    ): "close() gives it no time either, and without close() a process ends a millisecond later",
    (
        "kvscope.monitor.probes.vllm.block_hooks",
        "BlockHooks._allocated",
        "if who is None or who[0] not in self._state.numbers:",
        "who is None or who[0] not in self._state.numbers -> who is None",
    ): "the same request is looked up again below, with the same outcome",
    (
        "kvscope.monitor.probes.vllm.blocks_needed",
        "_cap",
        "return 1 << 62",
        "1 -> 2",
    ): "more blocks than any request needs, either way",
    (
        "kvscope.monitor.probes.vllm.blocks_needed",
        "_cap",
        "return 1 << 62",
        "62 -> 124",
    ): "more blocks than any request needs, either way",
    (
        "kvscope.monitor.probes.vllm.wait_causes",
        "WaitCauses.inspect",
        "if len(scheduled) < len(scheduler.running):",
        "len(scheduled) < len(scheduler.running) -> len(scheduled) <= len(scheduler.running)",
    ): "those with tokens run, so that of as many each is passed by: it only spares the loop",
    (
        "kvscope.monitor.probes.vllm.wait_causes",
        "WaitCauses._skipped",
        "return Cause.CONNECTOR if self._state.matches.get(request.request_id, 0) is None else Cause.UNKNOWN",
        "0 -> 1",
    ): "any number says that the connector was not asked",
    (
        f"{_RULES}.collapse.prefix_hits",
        "PrefixHits._missed_windows",
        "of_late = takewhile(lambda one: one.at_ns >= oldest_ns - window_ns, reversed(ledger.prompts))",
        "one.at_ns >= oldest_ns - window_ns -> one.at_ns > oldest_ns - window_ns",
    ): "a window is yielded only for a prompt that missed later: in the last lasts_s, or in the last window_s",
}
