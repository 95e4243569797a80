"""Start eval.pyz, of which this is the __main__: unpack it once into the user's cache, and run eval.py there.

Inside an archive the verifier's workers, which import their modules from files, would find none.
"""

import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path


def unpack(archive: Path, cache: Path) -> Path:
    """Return the folder with the files of an archive, named by the archive's hash.

    Each file is moved there whole, so several that start at once do not disturb each other, and a file that a
    clean-up of the cache has taken comes back.
    """
    folder = cache / f"eval-{hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}"
    with zipfile.ZipFile(archive) as files:
        names = files.namelist()
        if all((folder / name).is_file() for name in names):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            files.extractall(fresh)
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(fresh, name), folder / name)
    return folder


def main() -> None:
    archive = Path(__file__).parent
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "winnow")
        folder = unpack(archive, cache)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        print(f"error: {archive.name} cannot unpack itself: {error}; set XDG_CACHE_HOME to a folder that can "
              "be written", file=sys.stderr)
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, str(folder / "eval.py"), *sys.argv[1:]])


if __name__ == "__main__":
    main()
