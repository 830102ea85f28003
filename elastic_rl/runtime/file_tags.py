"""The tag in the names of the files that a process leaves, by which ``host.leftovers`` finds them.

Programs that import this start often, so it imports nothing of the project.
"""

from __future__ import annotations

import os
import tempfile

TAG_ENV = "ELASTIC_RL_FILE_TAG"
"""Environment variable with the tag for the files of a process."""


def tag_temporary_files() -> str:
    """Puts the tag that the environment names into the names of the temporary files and folders that this process
    makes, and those that are forked from it; returns it, empty for none. Call it before packages are imported that make
    folders then, as wandb does."""
    tag = os.environ.get(TAG_ENV, "")
    tempfile.template = f"{tag}tmp"
    return tag
