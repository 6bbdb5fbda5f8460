from pathlib import Path

import pytest

from changeover.machine.errors import InvalidInput
from changeover.pipeline.load import load_pipeline
from changeover.pipeline.plan import make_plan, refuse_if_impossible
from changeover.pipeline.plan_text import plan_text
from changeover.states.prompts import is_held_out, read_prompts
from tests.engines.sglang_tree import MODEL, make_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
TIB = 2**40


@pytest.fixture
def kimi():
    return load_pipeline(EXAMPLES / "kimi-k25.yaml")


@pytest.fixture
def laptop():
    return load_pipeline(EXAMPLES / "laptop.yaml")


def test_the_reference_run_is_planned_to_the_byte(kimi, tmp_path):
    plan = make_plan(kimi, tmp_path, tmp_path, free_bytes=2 * TIB)
    assert plan.refusals == ()
    assert plan.disk_bytes == 992_051_200_000
    text = plan_text(plan)
    for words in (
        "923.9 GiB",
        "17,300,000 tokens",
        "boundaries 3, 31, 59 and last",
        "hidden 7168",
        "sglang.launch_server",
        "--tp-size 8",
        "--disable-radix-cache",
        "--speculative-algorithm EAGLE3",
        "ports 30000",
        "min",
    ):
        assert words in text


def test_a_short_disk_is_refused_and_nothing_starts(kimi, tmp_path):
    plan = make_plan(kimi, tmp_path, tmp_path, free_bytes=TIB)
    assert "923.9 GiB of states" in plan.refusals[0]
    with pytest.raises(InvalidInput, match="disk"):
        refuse_if_impossible(plan)


def test_the_laptop_run_is_possible_here(laptop, tmp_path):
    plan = make_plan(laptop, tmp_path, tmp_path, free_bytes=TIB)
    refuse_if_impossible(plan)
    servers = [phase.server for phase in plan.phases]
    assert [server.profile if server else None for server in servers] == [
        "production",
        "capture",
        None,
        "speculative",
    ]
    assert "--aux-boundaries" in servers[1].argv
    assert "--drafter" in servers[3].argv


def test_a_boundary_above_the_model_is_refused(laptop, tmp_path):
    spec = load_pipeline(EXAMPLES / "laptop.yaml", ["phases.capture.server.aux_boundaries=[2,15,31]"])
    plan = make_plan(spec, tmp_path, tmp_path, free_bytes=TIB)
    assert any("at most 30" in refusal and "saw 31" in refusal for refusal in plan.refusals)


def test_a_model_that_is_nowhere_is_an_error(tmp_path):
    spec = load_pipeline(EXAMPLES / "laptop.yaml", [f"model={tmp_path / 'no'}"])
    with pytest.raises(InvalidInput, match=r"config\.json"):
        make_plan(spec, tmp_path, tmp_path, free_bytes=TIB)


def test_a_plan_is_strict_json(kimi, tmp_path):
    import json

    json.dumps(make_plan(kimi, tmp_path, tmp_path, free_bytes=2 * TIB).to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("held_out_only", "share", "warmup"), [(False, 0.1, 2), (True, 0.1, 0), (True, 0.5, 3)]
)
def test_every_prompt_of_a_bench_is_counted(tmp_path, held_out_only, share, warmup):
    job = "phases.speculative.jobs.held-out"
    spec = load_pipeline(
        EXAMPLES / "laptop.yaml",
        [f"{job}.requests=all", f"{job}.warmup={warmup}", f"{job}.held_out_only={held_out_only}".lower(),
         f"phases.capture.jobs.collect.held_out={share}"],
    )  # fmt: skip
    ids = [prompt.id for prompt in read_prompts(Path(spec.prompts))]
    left = sum(is_held_out(one, share) or not held_out_only for one in ids) - warmup
    planned = make_plan(spec, tmp_path, tmp_path, free_bytes=TIB).phases[3].jobs
    does = next(job.does for job in planned if job.name == "held-out")
    assert does.startswith(f"every prompt once ({left}), ")


def test_a_bench_that_the_warm_up_leaves_no_prompt_is_refused(tmp_path):
    job = "phases.speculative.jobs.held-out"
    spec = load_pipeline(EXAMPLES / "laptop.yaml", [f"{job}.requests=all", f"{job}.warmup=1000000"])
    with pytest.raises(InvalidInput, match="held out from training"):
        make_plan(spec, tmp_path, tmp_path, free_bytes=TIB)


def test_a_capture_through_a_patch_that_the_source_does_not_take_is_refused(tmp_path):
    python = make_environment(tmp_path / "env")
    path = tmp_path / "p.yaml"
    path.write_text(
        f"""
name: patched
model: smollm2-135m-instruct
prompts: {EXAMPLES}/prompts/laptop.jsonl
engine: {{kind: sglang, python: {python}}}
phases:
  - name: capture
    server: {{profile: capture, capture_through: patch}}
    jobs: [{{kind: collect}}]
"""
    )
    plan = make_plan(load_pipeline(path), tmp_path, tmp_path, free_bytes=TIB)
    [refusal] = [it for it in plan.refusals if "patch" in it]
    assert refusal == (
        "capture: capture_through patch: expected a source of LlamaForCausalLM that the patch knows; "
        "saw in SGLang 0.5.23: none"
    )
    models = next((tmp_path / "env").glob("lib/python3*/site-packages/sglang/srt/models"))
    (models / "llama.py").write_text(MODEL.replace("Foo", "Llama"))
    plan = make_plan(load_pipeline(path), tmp_path, tmp_path, free_bytes=TIB)
    assert [it for it in plan.refusals if "patch" in it] == []


def test_only_a_capture_is_through_something(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(
        "name: x\nmodel: smollm2-135m-instruct\nengine: {kind: sglang}\n"
        "phases: [{name: a, server: {profile: production, capture_through: patch}, jobs: []}]\n"
    )
    with pytest.raises(InvalidInput, match="remove `capture_through:`"):
        load_pipeline(path)
