"""Every number of the demo in one place. The schedule counts tokens, never seconds."""

PRESET = "tiny"
VOCABULARY = 1024
SEED = 1

TOKENS = 6_000_000  # training tokens, about three passes over the training part
TRAINING = {  # openv41 train ... --set key=value
    "sequence_length": 512,
    "batch_tokens": 4096,
    "warmup_tokens": 200_000,
    "optimizer.lr": 3e-3,
}

EVALUATION_CONTEXT = 512  # tokens in a held-out window
EVALUATION_STRIDE = 384  # of them are scored, the others are context (but in a play's first window)
EVALUATION_NUMERICS = "f32"
PROMPT = "MACBETH.\n"
SAMPLE_TOKENS = 320
TEMPERATURE = 0.8
