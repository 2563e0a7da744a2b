"""A training step of NeMo AutoModel's eager path: random weights of its own, bfloat16, AdamW."""

import torch

from openv41.io.hf_config import to_document
from tests.peers.load import implementation


class NemoTraining:
    """The text model of a configuration, on a device."""

    def __init__(self, config, device):
        self.version = implementation("nemo-automodel")[1]  # before its own parts, see there
        from nemo_automodel.components.models.common import BackendConfig  # noqa: PLC0415
        from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config  # noqa: PLC0415
        from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM  # noqa: PLC0415

        document = to_document(config, quantized=False)
        text = {**document["text_config"], "num_nextn_predict_layers": 0}
        document |= {"text_config": text, "vision_config": {"num_hidden_layers": 0}}
        backend = BackendConfig(
            attn="sdpa", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch"
        )
        with torch.device(device):
            model = DeepseekV41ForCausalLM(
                DeepseekV41Config(**document), backend=backend, tokenizer=words(config.vocab_size)
            )
        self.device, self.model = device, model.to(device=device).train()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.02)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(self, rows):
        """Forward, backward and update on rows of equal length; returns the loss."""
        rows = rows.to(self.device)
        logits = self.model(rows).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits.float(), rows[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def words(vocab_size):
    """A tokenizer of as many words; nothing is tokenised."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    vocabulary = {f"w{number}": number for number in range(vocab_size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    )
