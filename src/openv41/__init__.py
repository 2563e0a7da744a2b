"""Independent PyTorch implementation of the DeepSeek-V4.1-Flash system."""

from openv41.config import NUMERICS as NUMERICS
from openv41.config import ModelConfig as ModelConfig
from openv41.config import NumericsConfig as NumericsConfig
from openv41.errors import OpenV41Error as OpenV41Error
from openv41.io.checkpoint import load_model as load_model
from openv41.io.checkpoint import save_model as save_model
from openv41.layers.batch import Batch as Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder as CausalEncoderDecoder
from openv41.model.init import init_weights as init_weights
from openv41.ops import kernels as kernels
from openv41.plan import plan_layers as plan_layers
from openv41.presets import preset as preset
