"""States in other trainers' files, and back: exact, whole or not there, and nothing believed that is not checked."""

from __future__ import annotations

import gzip
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from changeover.machine.errors import InvalidInput
from changeover.states.final_norm import read_final_norm
from changeover.states.formats.angelslim import AngelSlim
from changeover.states.formats.export import export
from changeover.states.formats.model_optimizer import ModelOptimizer
from changeover.states.formats.peer import PeerFormat
from changeover.states.formats.specforge import SpecForge
from changeover.states.formats.speculators import Speculators, read_rows
from changeover.states.formats.take_in import TakenIn, take_in
from changeover.states.prompts import is_held_out
from changeover.states.store import StatesReader, StatesWriter
from changeover.states.tensors import to_bf16_bits
from tests.states.fake_server import output_vectors, write_model
from tests.states.samples import assert_same, make_sample, small_manifest

FORMS = [SpecForge(), SpecForge(compressed=True), AngelSlim(), ModelOptimizer()]
IDS = [form.name + ("-gz" if getattr(form, "compressed", False) else "") for form in FORMS]
NAMES = [f"sample-{number}" for number in range(12)]


def right_states(name: str, tokens: int = 12):
    """The last state of each row is the output vector of the token that follows."""
    sample = make_sample(name, tokens)
    after = np.append(sample.input_ids[1:], 0)
    last = (np.ascontiguousarray(output_vectors()[after]).view(np.uint32) >> 16).astype(np.uint16)
    return type(sample)(sample.id, sample.input_ids, sample.loss_mask, sample.aux, last)


@pytest.fixture
def store(tmp_path: Path) -> StatesReader:
    with StatesWriter.create(tmp_path / "states", small_manifest(held_out_fraction=0.3)) as writer:
        for number, name in enumerate(NAMES):
            writer.add(right_states(name, tokens=8 + number))
    return StatesReader(tmp_path / "states")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def back(folder: Path, form: PeerFormat, out: Path, model: Path, **options: object) -> TakenIn:
    options = {"last_norm": "post" if form.last_norm is None else None, **options}
    return take_in(folder, form, small_manifest(), out, model, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_there_and_back_is_the_same_to_the_bit(
    form: PeerFormat, store: StatesReader, model: Path, tmp_path: Path
):
    done = export(store, form, tmp_path / "theirs", with_held_out=True)
    assert (done.samples, done.left_out) == (12, 0)
    taken = back(tmp_path / "theirs", form, tmp_path / "back", model)
    assert taken.sealed and taken.readings.as_said and taken.failed == {}
    again = StatesReader(tmp_path / "back")
    assert sorted(again.ids) == sorted(store.ids)
    for name in store.ids:
        assert_same(again.read(again.position(name)), store.read(store.position(name)))
    assert not list((tmp_path / "theirs").rglob("*.partial"))


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_what_is_held_out_is_not_given_to_be_trained_on(
    form: PeerFormat, store: StatesReader, tmp_path: Path
):
    done = export(store, form, tmp_path / "theirs")
    kept = [name for name in NAMES if not is_held_out(name, 0.3)]
    assert 0 < len(kept) < 12 and (done.samples, done.left_out) == (len(kept), 12 - len(kept))
    said = json.loads((tmp_path / "theirs" / "changeover.json").read_text())
    assert sorted(said["files"].values()) == sorted(kept)
    assert len(form.files(tmp_path / "theirs")) == len(kept)


def test_specforges_file_is_as_its_loader_reads_it(store: StatesReader, tmp_path: Path):
    export(store, SpecForge(), tmp_path / "theirs", with_held_out=True)
    export(store, SpecForge(compressed=True), tmp_path / "zipped", with_held_out=True)
    loaded = torch.load(tmp_path / "theirs/rows_0-2000/data_0.ckpt", weights_only=True)
    with gzip.open(tmp_path / "zipped/rows_0-2000/data_0.ckpt.gz") as file:
        zipped = torch.load(file, weights_only=True)
    sample = store.read(store.position(sorted(NAMES)[0]))
    shapes = {name: (tuple(one.shape), one.dtype) for name, one in loaded.items()}
    rows = sample.tokens
    assert shapes == {
        "input_ids": ((rows,), torch.int64),
        "loss_mask": ((rows,), torch.int64),
        "hidden_state": ((1, rows, 16), torch.bfloat16),
        "aux_hidden_state": ((1, rows, 48), torch.bfloat16),
    }
    assert all(torch.equal(loaded[name], zipped[name]) for name in loaded)
    low = loaded["aux_hidden_state"][0, :, :16].view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(low, sample.aux[:, 0])


def test_an_export_that_was_cut_off_is_gone_on_with(store: StatesReader, tmp_path: Path):
    out, form = tmp_path / "theirs", SpecForge()

    class StoppedError(Exception):
        pass

    def stop(progress):
        if progress.done == 5:
            raise StoppedError

    with pytest.raises(StoppedError):
        export(store, form, out, with_held_out=True, on_progress=stop)
    (out / "rows_0-2000" / ".data_5.ckpt.partial").write_bytes(b"half")
    done = export(store, form, out, with_held_out=True)
    assert (done.samples, done.skipped) == (12, 5) and len(form.files(out)) == 12
    with pytest.raises(InvalidInput, match="in another form"):
        export(store, AngelSlim(), out, with_held_out=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(InvalidInput, match="other files"):
        export(store, form, tmp_path / "full")


class Evil:
    def __reduce__(self):
        return (Path("/tmp/changeover-evil").touch, ())


def bad_files(folder: Path) -> dict[str, str]:
    """One file for each way to be bad; what must be said of it."""
    rows = folder / "rows_0-2000"
    whole = torch.load(rows / "data_0.ckpt", weights_only=True)
    (rows / "data_0.ckpt").write_bytes((rows / "data_0.ckpt").read_bytes()[:900])
    (rows / "data_1.ckpt").write_bytes(pickle.dumps(Evil()))
    torch.save({**whole, "hidden_state": whole["hidden_state"] * torch.nan}, rows / "data_2.ckpt")
    torch.save({**whole, "hidden_state": whole["hidden_state"][:, 1:]}, rows / "data_3.ckpt")
    torch.save({key: whole[key] for key in whole if key != "aux_hidden_state"}, rows / "data_4.ckpt")
    torch.save({**whole, "loss_mask": whole["loss_mask"][1:]}, rows / "data_5.ckpt")
    torch.save([1, 2], rows / "data_6.ckpt")
    torch.save({**whole, "input_ids": whole["input_ids"].float()}, rows / "data_7.ckpt")
    (rows / "data_8.ckpt").write_bytes(b"")
    reasons = [
        "",
        "",
        "NaN or infinity in last",
        "hidden_state: expected",
        "no aux_hidden_state",
        "loss_mask of",
    ]
    reasons += ["expected a dictionary", "input_ids: expected a tensor of whole numbers", ""]
    return {f"rows_0-2000/data_{number}.ckpt": reason for number, reason in enumerate(reasons)}


def test_each_bad_file_is_named_with_its_reason_and_the_good_ones_are_kept(
    store: StatesReader, model: Path, tmp_path: Path
):
    export(store, SpecForge(), tmp_path / "theirs", with_held_out=True)
    bad = bad_files(tmp_path / "theirs")
    taken = back(tmp_path / "theirs", SpecForge(), tmp_path / "back", model)
    assert taken.failed.keys() == bad.keys()
    for name, reason in bad.items():
        assert reason in taken.failed[name]
    assert not Path("/tmp/changeover-evil").exists(), "a file of somebody else was run"
    assert taken.samples == 3 and not taken.sealed
    assert "9 of 12 samples failed" in taken.objections[0]


def test_padding_is_dropped_where_it_is_asked_for(store: StatesReader, model: Path, tmp_path: Path):
    export(store, SpecForge(), tmp_path / "theirs", with_held_out=True)
    path = tmp_path / "theirs/rows_0-2000/data_0.ckpt"
    whole = torch.load(path, weights_only=True)
    rows = len(whole["input_ids"])

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        extra = (7,) if tensor.dim() == 1 else (1, 7, tensor.shape[2])
        return torch.cat([tensor, tensor.new_zeros(extra)], dim=tensor.dim() // 2)

    torch.save({name: padded(one) for name, one in whole.items()}, path)
    back(tmp_path / "theirs", SpecForge(), tmp_path / "kept", model)
    back(tmp_path / "theirs", SpecForge(), tmp_path / "trimmed", model, trim=True)
    name = sorted(NAMES)[0]
    kept, trimmed = StatesReader(tmp_path / "kept"), StatesReader(tmp_path / "trimmed")
    assert kept.read(kept.position(name)).tokens == rows + 7
    assert_same(trimmed.read(trimmed.position(name)), store.read(store.position(name)))


def test_files_that_do_not_say_their_norm_are_not_guessed_at(
    store: StatesReader, model: Path, tmp_path: Path
):
    export(store, ModelOptimizer(), tmp_path / "theirs")
    with pytest.raises(InvalidInput, match="--last-norm pre or post"):
        take_in(tmp_path / "theirs", ModelOptimizer(), small_manifest(), tmp_path / "back", model)


def test_files_of_another_form_are_said_to_be(store: StatesReader, model: Path, tmp_path: Path):
    export(store, AngelSlim(), tmp_path / "theirs")
    with pytest.raises(
        InvalidInput, match=r"none of them one: no loss_mask|none of them one: no aux_hidden_state"
    ):
        back(tmp_path / "theirs", SpecForge(), tmp_path / "back", model)
    with pytest.raises(InvalidInput, match="files of model-optimizer, such as"):
        back(tmp_path / "theirs", ModelOptimizer(), tmp_path / "other", model)


@pytest.fixture
def normed_model(tmp_path: Path) -> Path:
    """The same, with a final norm."""
    folder = write_model(tmp_path / "normed")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama", "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"lm_head.weight": torch.from_numpy(output_vectors())}
    tensors["model.norm.weight"] = torch.linspace(0.5, 3.0, 16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def as_floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_speculators_states_go_there_and_come_back(store: StatesReader, normed_model: Path, tmp_path: Path):
    """Its last states are before the norm: those come back as the norm makes them, all else to the bit."""
    unit = scaled_store(store, normed_model, tmp_path / "unit")
    out, form = tmp_path / "theirs", Speculators()
    export(unit, form, out, with_held_out=True, final_norm=read_final_norm(normed_model))
    taken = back(out, form, tmp_path / "back", normed_model)
    assert taken.sealed and taken.failed == {}
    again = StatesReader(tmp_path / "back")
    for name in unit.ids:
        mine, theirs = unit.read(unit.position(name)), again.read(again.position(name))
        np.testing.assert_array_equal(mine.aux, theirs.aux)
        np.testing.assert_array_equal(mine.input_ids, theirs.input_ids)
        np.testing.assert_array_equal(mine.loss_mask, theirs.loss_mask)
        np.testing.assert_allclose(as_floats(theirs.last), as_floats(mine.last), rtol=2**-6, atol=1e-6)


def scaled_store(store: StatesReader, model: Path, folder: Path) -> StatesReader:
    """States as a norm really gives them: its weight times a vector whose mean square is 1."""
    norm = read_final_norm(model)
    with StatesWriter.create(folder, store.manifest) as writer:
        for sample in store:
            writer.add(replace(sample, last=to_bf16_bits(norm.apply(as_floats(sample.last) / norm.weight))))
    return StatesReader(folder)


def test_speculators_files_are_as_its_loader_reads_them(
    store: StatesReader, normed_model: Path, tmp_path: Path
):
    out = tmp_path / "theirs"
    export(store, Speculators(), out, with_held_out=True, final_norm=read_final_norm(normed_model))
    names = sorted(NAMES)
    sample = store.read(store.position(names[3]))
    loaded = load_file(out / "hidden_states/hs_3.safetensors")
    assert (
        loaded["hidden_states"].shape == (sample.tokens, 4, 16)
        and loaded["hidden_states"].dtype == torch.bfloat16
    )
    assert loaded["token_ids"].tolist() == sample.input_ids.tolist()
    rows = read_rows(out)
    assert [len(row.input_ids) for row in rows] == [
        store.entry(store.position(name)).tokens for name in names
    ]
    counts = torch.load(out / "token_freq.pt", weights_only=True)
    assert sum(counts.values()) == sum(int(row.loss_mask.sum()) for row in rows)
    with pytest.raises(InvalidInput, match="--model"):
        export(store, Speculators(), tmp_path / "without")


def test_speculators_fp8_files_are_read(store: StatesReader, normed_model: Path, tmp_path: Path):
    unit = scaled_store(store, normed_model, tmp_path / "unit")
    out = tmp_path / "theirs"
    export(unit, Speculators(), out, with_held_out=True, final_norm=read_final_norm(normed_model))
    for path in (out / "hidden_states").glob("*.safetensors"):
        loaded = load_file(path)
        scales = loaded["hidden_states"].float().abs().amax(dim=(1, 2), keepdim=True) / 448
        small = (loaded["hidden_states"].float() / scales).to(torch.float8_e4m3fn)
        save_file({**loaded, "hidden_states": small, "hidden_states_scales": scales}, path)
    taken = back(out, Speculators(), tmp_path / "back", normed_model)
    again = StatesReader(tmp_path / "back")
    mine, theirs = unit.read(0), again.read(again.position(unit.ids[0]))
    off = as_floats(mine.aux) - as_floats(theirs.aux)
    assert (
        taken.failed == {}
        and 0 < np.sqrt(np.mean(off**2)) / np.sqrt(np.mean(as_floats(mine.aux) ** 2)) < 0.05
    )


def test_speculators_states_of_other_tokens_than_the_datasets_are_named(
    store: StatesReader, normed_model: Path, tmp_path: Path
):
    out = tmp_path / "theirs"
    export(store, Speculators(), out, with_held_out=True, final_norm=read_final_norm(normed_model))
    hidden = out / "hidden_states"
    (hidden / "hs_1.safetensors").rename(hidden / "keep")
    (hidden / "hs_2.safetensors").rename(hidden / "hs_1.safetensors")
    (hidden / "keep").rename(hidden / "hs_40.safetensors")
    (hidden / "hs_0.safetensors").write_bytes((hidden / "hs_0.safetensors").read_bytes()[:300])
    taken = back(out, Speculators(), tmp_path / "back", normed_model)
    said = {Path(name).stem: reason for name, reason in taken.failed.items()}
    assert said.keys() == {"hs_0", "hs_1", "hs_40"}
    assert "other tokens than row 1" in said["hs_1"] and "it has 12" in said["hs_40"]
