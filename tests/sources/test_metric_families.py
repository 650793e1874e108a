"""Each metric family of a supported release is read, or ignored for a reason."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from kvscope.lab.recorded_pages import DATA, served, whole_page
from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.sources.metric_families import FIELD_OF_FAMILY, family_table, metric_family, unused_families
from kvscope.monitor.sources.metrics_page import MetricsPage
from scripts.metric_families import LIST, named_families, read_releases, written

TEXT = LIST.read_text(encoding="utf-8")
RELEASES = read_releases(TEXT)
PAGES = {"vllm": whole_page(), "sglang": gzip.decompress((DATA / "sglang-page.prom.gz").read_bytes()).decode()}


@pytest.mark.parametrize("release", RELEASES)
def test_each_family_of_a_release_has_a_decision(release: str) -> None:
    families = {metric_family(name) for name in RELEASES[release]}
    assert len(families) > 30
    undecided = [each for each in families if each not in FIELD_OF_FAMILY and not family_table().reason(each)]
    assert not undecided, f"{release} has families without a decision in metric_families.toml: {sorted(undecided)}"


def test_the_table_has_nothing_that_no_release_has() -> None:
    known = {metric_family(name) for families in RELEASES.values() for name in families}
    listed = [family for group in family_table().ignored for family in group.families]
    assert len(listed) == len(set(listed))
    for family in listed:
        assert any(one == family or (family[-1] == "*" and one.startswith(family[:-1])) for one in known), family
    for family in FIELD_OF_FAMILY:
        assert not family_table().reason(family), f"{family} is read, and ignored as well"
        assert family in known or family.startswith("kvscope_engine_"), family


def test_each_field_that_is_read_names_its_codes() -> None:
    read = family_table().read
    assert read.keys() == set(FIELD_OF_FAMILY.values())
    for codes in read.values():
        assert codes
        assert set(codes) <= {*CATALOGUE, "every", "shown"}


@pytest.mark.parametrize("engine", PAGES)
def test_a_real_page_says_how_much_of_it_was_used(engine: str) -> None:
    """Counted by another hand: the TYPE lines of the page."""
    types = set(re.findall(rf"^# TYPE ({engine}:\S+) ", PAGES[engine], re.M))
    types = {name for name in types if not name.endswith("_created")}
    with served(PAGES[engine]) as server:
        page = MetricsPage(server.url)
        facts = {record.name: record.value for record in page.scrape() if isinstance(record, Fact)}
        notes = page.status().notes
        page.close()
    assert facts["metric_families"] == len(types)
    unused = str(facts["unused_metric_families"]).split(", ")
    assert notes == (
        f"{len(unused)} of {len(types)} metric families of this page were not used (--format json names them)",
    )
    assert {metric_family(name) for name in types} - set(unused) <= FIELD_OF_FAMILY.keys()


def test_a_family_that_no_table_has_is_named() -> None:
    found = unused_families(["vllm:num_requests_running", "vllm:brand_new_total", "python_info"])
    assert (found.of, found.unknown) == (2, ["vllm:brand_new"])
    assert "does not know vllm:brand_new" in found.note()
    assert unused_families(["vllm:num_requests_running"]).note() == ""


def test_the_list_is_made_of_a_releases_strings(tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text('name = "vllm:one_total"\ntext = f"see vllm:two"\n"sglang:three is one"\n')
    assert list(named_families(tmp_path)) == ["vllm:one_total"]
    assert written(RELEASES) == TEXT
