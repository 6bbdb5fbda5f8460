"""What every room's tests may ask for: the real small model, and a tiny random one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.tiny_model import build_tiny_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a hub, also not by accident
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts what it puts in the background with SIGINT ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that takes long on a busy machine is no defect; what is slow is measured in benchmarks/.
settings.register_profile("changeover", deadline=None)
settings.load_profile("changeover")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The real small model (SmolLM2-135M-Instruct, bf16) as a Hugging Face folder.

    ``CHANGEOVER_TEST_MODEL`` names a folder that is already converted; otherwise it is converted once into
    the models directory that ``changeover run`` uses. Without the package that holds the weights this fails
    and does not skip: the tests that need a real model are the ones that say whether Changeover works.
    """
    given = os.environ.get("CHANGEOVER_TEST_MODEL")
    if given:
        folder = Path(given)
        if not (folder / "config.json").is_file():
            pytest.fail(
                f"CHANGEOVER_TEST_MODEL: expected a Hugging Face folder with config.json; saw {folder}"
            )
        return folder
    from changeover.engines.models import default_models_dir, resolve_model

    return Path(resolve_model("smollm2-135m-instruct", default_models_dir()).path)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama (8 layers, hidden 64, vocabulary 448) with tokenizer and chat template."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium. Without one the browser tests are skipped on a developer's machine, and fail in CI."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        reason = f"no browser: none of {', '.join(names)} is on PATH"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
