"""Embeds your pictures and texts with a trained model, and compares them by its geometry.

    python -m examples.embed_pictures openai/clip-vit-base-patch32 --texts "a red boat" "two dogs" --pictures *.jpg

The model is a run, a model folder or a hub name; it brings its preprocessing and its tokenizer.
"""

from pathlib import Path

import numpy as np

from common.base.arguments import Parser, file_to_write
from common.base.files import printable, shown
from common.base.places import outputs
from common.run.launch import run_or_explain
from common.run.named_models import open_model


def main(arguments: list[str] | None = None) -> Path:
    parser = Parser(__doc__)
    parser.add_argument("model", help="run, model folder or name on the hub")
    parser.add_argument("--pictures", nargs="+", required=True, help="files")
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument(
        "--output", type=file_to_write, default=outputs() / "embeddings.npz", help="default %(default)s"
    )
    options = parser.parse_args(arguments)

    _, encoder = open_model(options.model)
    images = encoder.pictures(options.pictures)  # files, or pictures that Pillow has opened
    texts = encoder.texts(options.texts)
    geometry, device = encoder.model.geometry, encoder.device
    similarity = geometry.similarity(images.to(device), texts.to(device)).cpu()
    for text, column in zip(options.texts, similarity.T):
        best = column.argmax()
        print(f"{text}: {printable(options.pictures[best])}, similarity {column[best]:.3f} ({geometry.name})")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("wb") as file:  # by its name numpy would add a suffix
        np.savez(file, images=images.numpy(), texts=texts.numpy(), similarity=similarity.numpy())
    print(shown(options.output))
    return options.output


if __name__ == "__main__":
    run_or_explain(main)
