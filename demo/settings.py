"""Every number of the demo in one place. The schedule counts tokens, never seconds."""

PRESET = "tiny"
VOCABULARY = 2048
SEED = 1

TOKENS = 524_288  # of pre-training, a tenth more follow; a sixteenth of them belong to images
STAGES = "pretrain,posttrain,dspark"
TRAINING = {  # openv41 train ... --set key=value
    "sequence_length": 128,
    "batch_tokens": 2048,
    "image_share": 0.0625,
    "warmup_tokens": 20_000,
    "decay": "linear",
    "cpu_threads": 1,
    "heldout_tokens": 8192,
    "pretrain.final_lr_factor": 0.1,  # where post-training goes on
    "posttrain.bounded_replay": "off",  # it would learn from half of the text
    # For 256 short steps of a tiny model; see docs/training.md.
    "optimizer.token_update": "adamw",
    "optimizer.lr": 1.4e-2,
    "optimizer.momentum": 0.8,
    "optimizer.weight_decay": 0.0,
    "optimizer.token_lr_factor": 2.0,
    "optimizer.engram_table_lr_factor": 2.0,
    "optimizer.vision_lr_factor": 1.0,
    "indexer_loss": 0.0,
    "balance_loss": 0.0,
    "restrict_candidates": "true",
    # Of half a million tokens hardly a 4-gram comes twice: more room for pairs and triples.
    "model.engram.max_ngram": 3,
    "model.engram.num_heads": 4,
    "model.engram.table_size": 65_536,
    # A drafter of one stage.
    "model.dspark.num_stages": 1,
    "dspark.tokens": 409_600,
    "dspark.batch_tokens": 1024,
    "dspark.warmup_tokens": 4096,
    "dspark.draft.anchors": 32,
    "dspark.optimizer.lr": 3e-2,
}

HELDOUT_DIGITS = 360  # the last of 1,797
WORD_PICTURES, HELDOUT_WORDS = 1200, 200

EVALUATION_CONTEXT = 128  # tokens in a held-out window, as in training
EVALUATION_STRIDE = 112  # of them are scored, the others are context (but in a play's first window)
EVALUATION_NUMERICS = "f32"
PROMPT = "MACBETH.\n"
SAMPLE_TOKENS = 160
TEMPERATURE = 0.8
SERVED_TOKENS = 1600  # length of the prompt whose prefill is timed
AGREEMENT_PROMPTS, AGREEMENT_TOKENS, AGREEMENT_DRAWN = 16, 320, 8
CHANGED_TOKENS = 40  # of them at its end, the second time
DRAFT_PROMPTS, DRAFT_PROMPT_TOKENS, DRAFT_ANSWER_TOKENS, DRAFT_TIMED = 12, 64, 64, 3
