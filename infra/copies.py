"""The user's own files that a run depends on, and the copies of them that its folder keeps."""

from pathlib import Path

from config import Reward
from infra.tokenizer import Tokenizer

# A copy of each, made at the start, lies in the run folder. A module that the reward file or the environment
# imports from its own folder has a copy of the same name.
COPIES = {"reward.custom_file": "custom_reward.py", "environment.file": "environment.py",
          "data.chat_template": "chat_template.jinja"}
Texts = dict[str, str | None]  # of COPIES and of helpers, as they are now; None if not set


def files_of(reward: Reward, tokenizer: Tokenizer) -> Texts:
    """Return the texts of COPIES, as they were read."""
    source = None
    if reward.functions:
        from infra.user_files import read_file

        source = read_file(reward.custom_file, "reward.custom_file")
    files = {"reward.custom_file": source and source.text} | dict(source.helpers if source else {})
    return files | tokenizer.own_files


def changed_files(folder: Path, texts: Texts) -> dict[str, Path]:
    """Map each setting with a file that has changed since the run in a folder began to the copy there.

    `texts` holds the present text of each file of COPIES, or None if it is not set.
    """
    copies = {setting: folder / COPIES.get(setting, setting) for setting in texts}
    return {setting: copy for setting, copy in copies.items()
            if texts[setting] != (copy.read_text() if copy.is_file() else None)}
