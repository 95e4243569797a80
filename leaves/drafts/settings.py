"""Settings of drafts: rollout.drafts."""

# A prompt's completions of the last epoch are drafts of its next ones: tokens that a new one shares with them
# need no decoding step of their own. Completions stay the same, up to rounding.
CHOICES = {"rollout.drafts": bool | None}
HOOKS = ("spec", "parts")
REQUIRES = {
    "rollout.drafts=true": [
        "windows.tokens=null: drafts are of whole completions",
        "windows.max_age=null: drafts are of completions by one policy",
        "labels.kind=gold: votes are not asked for a group at a time",
        "prune.prompts.kind=none, bernoulli, rank, pps or greso: DEPO has a history of its own"],
}
