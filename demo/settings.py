"""Every number of the demo in one place. The schedule counts tokens, never seconds."""

PRESET = "tiny"
VOCABULARY = 1024
SEED = 1

TOKENS = 6_000_000  # training tokens, about three passes over the training part
CONTEXT = 512  # tokens in a training document piece
BATCH_TOKENS = 4096
LEARNING_RATE = 3e-3
WARMUP_TOKENS = 200_000

EVALUATION_CONTEXT = 512  # tokens a held-out window holds; its second half is scored
PROMPT = "MACBETH.\n"
SAMPLE_TOKENS = 320
TEMPERATURE = 0.8
