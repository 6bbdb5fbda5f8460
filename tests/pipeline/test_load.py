import copy
from pathlib import Path

import pytest
import yaml

from changeover.machine.errors import InvalidInput
from changeover.pipeline.load import apply_override, check_pipeline, load_pipeline
from changeover.pipeline.schema import pipeline_schema

EXAMPLES = Path(__file__).parents[2] / "examples"
LAPTOP = yaml.safe_load((EXAMPLES / "laptop.yaml").read_text())


def changed(*overrides: str) -> dict:
    document = copy.deepcopy(LAPTOP)
    document["model"] = {"path": document["model"]}
    for override in overrides:
        apply_override(document, override)
    return document


@pytest.mark.parametrize("name", ["laptop.yaml", "kimi-k25.yaml"])
def test_the_examples_are_valid(name):
    spec = load_pipeline(EXAMPLES / name)
    assert [phase.name for phase in spec.phases] == ["baseline", "capture", "train", "speculative"]


def test_paths_are_relative_to_the_file_that_names_them():
    spec = load_pipeline(EXAMPLES / "laptop.yaml")
    assert spec.prompts == str((EXAMPLES / "prompts" / "laptop.jsonl").resolve())
    assert spec.phases[0].jobs[0].prompts == str((EXAMPLES / "prompts" / "bench.jsonl").resolve())


def test_folders_of_drafters_and_states_are_too_wherever_a_run_is_resumed(tmp_path):
    document = changed(
        "phases.train.jobs.train.states=./states", "phases.speculative.server.drafter=../drafter"
    )
    path = tmp_path / "with a space" / "é.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(document))
    spec = load_pipeline(path)
    assert spec.phases[2].jobs[0].states == str(path.parent / "states")
    assert spec.phases[3].server.drafter == str(tmp_path / "drafter")


@pytest.mark.parametrize("override", ["phases=3", "phases=[3]", "phases.0.jobs=3", "phases.0.jobs=[3]"])
def test_what_is_no_list_of_sections_is_refused_by_name(tmp_path, override):
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(changed(override)))
    with pytest.raises(InvalidInput, match="`phases"):
        load_pipeline(path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engin.kind=sglang", ["`engin`", "did you mean `engine`?"]),
        ("phases.baseline.jobs.bench.repeat=5", ["phases.0.jobs.0.repeat", "did you mean `repeats`?"]),
        ("phases.capture.server.aux_boundary=[2]", ["did you mean `aux_boundaries`?"]),
        ("engine.kind=sglan", ["engine.kind", "'sglan'"]),
        (
            "phases.train.jobs.train.states=baseline/bench",
            ["expected an earlier collect", "`capture/collect`"],
        ),
        ("phases.speculative.server.drafter=null", ["needs `drafter:`"]),
        ("phases.baseline.server.drafter=train/train", ["does not use a drafter"]),
        ("phases.speculative.jobs.compare.candidate=train/train", ["earlier bench", "`baseline/bench`"]),
        ("phases.baseline.server=null", ["needs a `server:`"]),
        ("phases.baseline.name=capture", ["two phases have one name"]),
        ("phases.baseline.jobs.bench.kind=stress", ["expected `kind:`", "stress"]),
        ("phases.baseline.jobs.bench.name=server", ["two processes of one name"]),
        ("phases.baseline.jobs.bench.requests=0", ["requests", "greater than or equal to 1"]),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(override, words):
    with pytest.raises(InvalidInput) as caught:
        check_pipeline(changed(override), source="test")
    for word in words:
        assert word in caught.value.seen
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.nccl.prot=LL", "`engine.nccl.prot`: unknown key; did you mean `proto`?"),
        ("phases.speculative.server.draft_top_k=4", "verify_tokens:"),
        ("phases.speculative.server.verify_tokens=4", "a chain is verified whole"),
        ("phases.baseline.server={profile: production, draft_top_k: 2, verify_tokens: 4}", "drafts nothing"),
        ("engine={kind: sglang, nccl: {algo: Ring}, env: {NCCL_ALGO: Tree}}", "NCCL_ALGO: both in"),
    ],
)
def test_settings_that_contradict_each_other_are_told(override, words):
    with pytest.raises(InvalidInput) as refused:
        load_pipeline(EXAMPLES / "laptop.yaml", [override])
    assert words in str(refused.value)


def test_nccl_is_told_in_its_own_words():
    spec = load_pipeline(EXAMPLES / "laptop.yaml", ["engine.nccl={proto: LL128, max_channels: 8}"])
    assert spec.engine.nccl.environment() == {"NCCL_PROTO": "LL128", "NCCL_MAX_NCHANNELS": "8"}


def test_every_problem_is_told_at_once():
    with pytest.raises(InvalidInput, match="2 problem") as caught:
        check_pipeline(changed("engin.kind=x", "phases.train.jobs.train.epoch=3"), source="test")
    assert "`engine`" in caught.value.seen
    assert "`epochs`" in caught.value.seen


def test_overrides_reach_items_by_name_kind_and_number():
    document = changed(
        "phases.baseline.jobs.bench.repeats=5", "phases.0.jobs.0.requests=3", "engine.env.OMP_NUM_THREADS='2'"
    )
    spec = check_pipeline(document, source="test")
    assert (spec.phases[0].jobs[0].repeats, spec.phases[0].jobs[0].requests) == (5, 3)
    assert spec.engine.env == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    "override", ["phases.nothere.name=x", "name.first=x", "noequals", ".=1", "phases.9.name=x"]
)
def test_an_override_that_leads_nowhere_says_so(override):
    with pytest.raises(InvalidInput):
        apply_override(changed(), override)


def test_a_missing_file_and_bad_yaml_say_what_to_do(tmp_path):
    with pytest.raises(InvalidInput, match=r"examples/laptop\.yaml"):
        load_pipeline(tmp_path / "no.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(InvalidInput, match="YAML"):
        load_pipeline(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(InvalidInput, match="a mapping at the top"):
        load_pipeline(tmp_path / "list.yaml")


def test_yaml_cannot_make_python_objects(tmp_path):
    (tmp_path / "evil.yaml").write_text("name: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(InvalidInput):
        load_pipeline(tmp_path / "evil.yaml")


def test_the_published_schema_is_up_to_date():
    published = Path(__file__).parents[2] / "docs" / "reference" / "pipeline.schema.json"
    assert published.read_text() == pipeline_schema(), "run: python -m changeover.pipeline.schema > " + str(
        published
    )


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "p.yaml").write_bytes("name: ä".encode("latin-1"))
    with pytest.raises(InvalidInput, match="as UTF-8"):
        load_pipeline(tmp_path / "p.yaml")
