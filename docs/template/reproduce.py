"""What `make search` trains."""

from common.reproduce.rows import PaperCode
from my_geometry.config import Config
from my_geometry.evaluate import MODELS, PAPER
from my_geometry.train import train

CODE = PaperCode(PAPER, Config, train, MODELS.reevaluate)
