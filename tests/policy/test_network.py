"""The network of the learned policy: its configurations and its file."""

import math
from pathlib import Path

import numpy as np
import pytest

from specinfer.core.errors import ModelError
from specinfer.drafters import SuffixDrafter
from specinfer.policy.learned_choice import load_policy_network
from specinfer.policy.network import Configuration, PolicyNetwork, make_configurations
from tests.policy.untrained_network import SLOTS, make_network


def test_the_menu_begins_with_plain_decoding_and_names_only_present_drafters() -> None:
    for slots in (("suffix",), ("model",), SLOTS, ("ngram", "model", "suffix", "model-2")):
        menu = make_configurations(slots)
        assert menu[0] == Configuration()
        assert len(set(menu)) == len(menu) <= 24
        assert {slot for one in menu for slot in one.slots} == set(slots)
    asked = {one.slots for one in make_configurations(("ngram", "model", "suffix"))}
    assert asked == {(), ("ngram", "suffix"), ("model",), ("ngram", "model", "suffix")}


def test_a_predictor_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    made = make_network(seed=3)
    made.save(tmp_path / "it.safetensors")
    back = PolicyNetwork.load(tmp_path / "it.safetensors")
    assert (back.slots, back.names, back.configurations, back.about) == (
        made.slots,
        made.names,
        made.configurations,
        made.about,
    )
    features = np.random.default_rng(0).normal(size=(4, len(made.names)))
    features[1, 2] = math.nan
    assert np.allclose(back.expect(features).tokens, made.expect(features).tokens, rtol=1e-5)
    expected = made.expect(features)
    assert (expected.tokens[:, 0] == 1).all(), "off yields one token"
    assert (expected.nodes[:, 0] == 0).all()
    assert np.isfinite(expected.tokens).all()
    depths = np.asarray([one.max_depth for one in made.configurations])
    assert (expected.tokens <= 1 + depths).all()


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "it.safetensors"
    make_network().save(whole)
    data = whole.read_bytes()
    bad = {
        "empty": b"",
        "cut": data[:-40],
        "text": b"hello" * 100,
        "menu": data.replace(b'max_nodes\\": 31', b'max_nodes\\": -1'),
        "version": data.replace(b'version\\": 2', b'version\\": 7'),
    }
    for name, content in bad.items():
        assert content != data
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ModelError, match=f"speculation_policy: .*{name} is damaged"):
            PolicyNetwork.load(path)
    wrong = make_network()
    wrong.layers[0][1][0] = math.nan
    wrong.save(tmp_path / "nan")
    with pytest.raises(ModelError, match="not finite"):
        PolicyNetwork.load(tmp_path / "nan")
    with pytest.raises(ModelError, match="specinfer tune --policy"):
        PolicyNetwork.load(tmp_path / "missing")
    with pytest.raises(ValueError, match="trained with drafters model, suffix, not suffix"):
        load_policy_network(str(whole), SuffixDrafter())
