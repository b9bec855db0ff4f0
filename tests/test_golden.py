"""Frozen weights give the numbers of tests/golden.json: pictures, captions, words, towers, geometries, metrics.

No law can say that a preprocessing step or a tower still computes what it did when the committed results were measured;
this can. Where a change is meant, `python tests/test_golden.py` writes the file again, and results are measured anew.
"""

import argparse
import importlib
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from runs import row_config

from common.data.pairs import open_training_pairs
from common.evaluation.embed import CaptionRule, Encoder, embed_pairs
from common.run.evaluation import zero_shot_and_retrieval
from common.run.inputs import open_training_data

GOLDEN = Path(__file__).with_name("golden.json")
ROWS = {
    "oblique_topology": ["table2_clip", "table2_multi", "ablation_geodesic_264", "ablation_euclidean_264"],
    "euclip": ["table4_clip", "table4_elliptic", "table4_euclip", "table4_meru"],
    "contrastive_basics": ["table1_ours"],
    "geomm": ["albef_geo"],
}
FIRST = 6  # pictures and captions whose similarities are kept


def freeze(model):
    """Weights that no release of PyTorch changes: a legacy generator of numpy, seeded by the name of each tensor."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() == 1:
                continue  # multiplier, curvature, scales: their starts are part of a method
            drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(parameter.shape)
            one_dimensional_scale = parameter.ndim == 1 and name.endswith("weight")  # of a LayerNorm
            parameter.copy_(torch.from_numpy(0.2 * drawn + one_dimensional_scale))


def measured(paper, row):
    """Similarities of the first test pictures with the first captions, and every metric."""
    config = row_config(paper, row)
    training = open_training_data(config, open_training_pairs(config.data, 0), None)
    model = importlib.import_module(f"{paper}.model").build_model(config, training.tokenizer)
    freeze(model)
    model.eval()
    transform, tokenizer, length = training.transform, training.tokenizer, config.data.context_length
    encoder = Encoder(model, transform, tokenizer, length, config.run.evaluation_batch_size, torch.device("cpu"))
    embedded = embed_pairs(encoder, training.evaluation_sets.retrieval["test"], CaptionRule())
    similarities = model.geometry.similarity(embedded.images[:FIRST], embedded.texts[:FIRST])
    results = zero_shot_and_retrieval(config, encoder, training.evaluation_sets)
    return {
        "words": training.tokenizer.vocabulary_size,
        "similarities": [[round(value, 5) for value in row] for row in similarities.tolist()],
        "metrics": {
            role: {name: round(value, 4) for name, value in result.metrics.items()}
            for role, result in sorted(results.items())
        },
    }


@pytest.mark.parametrize(("paper", "row"), [(paper, row) for paper, rows in ROWS.items() for row in rows])
def test_frozen_weights_give_the_numbers_that_they_gave(paper, row):
    golden, values = json.loads(GOLDEN.read_text())[f"{paper}/{row}"], measured(paper, row)
    assert values["words"] == golden["words"]
    assert torch.tensor(values["similarities"]) == pytest.approx(torch.tensor(golden["similarities"]), rel=1e-3)
    assert values["metrics"].keys() == golden["metrics"].keys()
    for role, metrics in golden["metrics"].items():
        assert values["metrics"][role] == pytest.approx(metrics, abs=0.03), role  # a near tie may fall either way


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    everything = {f"{paper}/{row}": measured(paper, row) for paper, rows in ROWS.items() for row in rows}
    lines = (f"{json.dumps(name)}: {json.dumps(values)}" for name, values in everything.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
