"""Where outputs go, and which files are the repository's: in a checkout, in a copy, and installed beside libraries."""

from common.base import places
from common.base.places import is_installed, is_of_repository, outputs


def test_outputs_lie_in_the_checkout_within_it_and_elsewhere_in_the_current_folder(tmp_path, monkeypatch):
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    monkeypatch.setattr(places, "ROOT", checkout)
    for folder, root in ((checkout, checkout), (checkout / "docs", checkout), (elsewhere, elsewhere)):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        assert outputs() == root / "outputs"


def test_beside_libraries_only_the_packages_are_the_repository_s(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "ROOT", tmp_path)
    files = [tmp_path / name for name in ("euclip/model.py", "vlgeometry/compare.py", "torch/nn.py", "mine.py")]
    # a checkout, or a project that holds a copy: all of it but a virtual environment
    assert not is_installed()
    assert all(map(is_of_repository, files))
    assert not is_of_repository(tmp_path / ".venv/lib/python3.11/site-packages/torch/nn.py")
    assert not is_of_repository(tmp_path.parent / "other.py")
    (tmp_path / "contrastive_vision_language_geometry-0.1.0.dist-info").mkdir()
    assert is_installed()
    assert [is_of_repository(file) for file in files] == [True, True, False, False]
