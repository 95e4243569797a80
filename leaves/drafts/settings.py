"""Settings of drafts: rollout.drafts."""

# torch: a prompt's completions of the last epoch are read in one pass; tokens that a new one shares with them
# need no decoding step. Completions stay the same.
CHOICES = {"rollout.drafts": bool | None}
HOOKS = ("parts",)
REQUIRES = {
    "rollout.drafts=true": [
        "rollout.engine=auto or torch: vLLM has no pass over several drafts",
        "windows.tokens=null: drafts are of whole completions",
        "windows.max_age=null: drafts are of completions by one policy",
        "environment.file=null: drafts hold no replies",
        "labels.kind=gold: votes are not asked for a group at a time",
        "prune.prompts.kind=none, bernoulli, rank, pps or greso: DEPO has a history of its own"],
}
