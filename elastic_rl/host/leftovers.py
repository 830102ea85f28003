"""What a compute plane may leave on this machine when it is killed: processes, and files outside the job's folder.

Processes have the mark of their job in their environment (``processes.RUN_MARK``). Their temporary files and sockets
are in the job's own temp folder. Files there and in /dev/shm have the tag of their owner in their name, folders too.
The process that ends or replaces an owner removes the files of its tag; a sweep removes those of the whole job, with
its temp folder. The mark, the folder and the tags are of ``JobPaths``.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.errors import PreflightFailed
from elastic_rl.host import processes
from elastic_rl.host.compute_services import compute_services
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.files import os_error_text, private_folder

log = logging.getLogger(__name__)

_COMPILED_ENV = "TORCHINDUCTOR_CACHE_DIR"


def temp_environment(job: JobPaths) -> dict[str, str]:
    """The environment variables that name temporary folders to the job's compute plane. The job's temp folder ends with
    its processes, after which everything would be compiled again: so the cache of Torch's compiler, whose content is
    run, has a private folder beside it, unless this process's environment names one."""
    compiled = {} if _COMPILED_ENV in os.environ else {_COMPILED_ENV: str(job.compiled)}
    return {"TMPDIR": str(job.temp), **compiled}


def make_temp_folder(job: JobPaths) -> None:
    """Makes the folders of ``temp_environment``. Raises PreflightFailed."""
    for folder in map(Path, temp_environment(job).values()):
        try:
            private_folder(folder)
        except OSError as e:
            raise PreflightFailed(f"the folder for temporary files cannot be made: {os_error_text(e, folder)}",
                                  hint="set TMPDIR to a folder of this user with a short path") from e


def tagged_files(tag: str) -> list[Path]:
    """Shared-memory segments, temporary files and folders, and sockets whose names carry ``tag``."""
    return [path for folder in (SHM, Path(tempfile.gettempdir())) for path in folder.glob(f"*{tag}*")]


def remove_files(tag: str) -> list[Path]:
    """Removes this user's files of a tag, and its folders with all that is in them, and returns them. Call it when
    their owner has ended: what is in use is removed too. Other users may create entries with such names in these
    folders, so all others are left alone."""
    removed = []
    for path in tagged_files(tag):
        try:
            mode = own_mode(path)
            if stat.S_ISDIR(mode):
                shutil.rmtree(path, ignore_errors=True)  # others may be removing the same
                if path.exists():
                    path.rmdir()  # which says what is wrong
            elif any(is_kind(mode) for is_kind in (stat.S_ISREG, stat.S_ISSOCK, stat.S_ISLNK)):
                path.unlink(missing_ok=True)
            else:
                continue
            removed.append(path)
        except OSError as e:
            log.warning("%s cannot be removed: %s", path, e.strerror)
    return removed


def own_mode(path: Path) -> int:
    """``st_mode`` of an entry of this user, not of what it links to; 0 for one of another user and for none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_mode if found.st_uid == os.getuid() else 0


def sweep(job: JobPaths) -> list[int]:
    """Ends every process of the job's compute plane and removes its files; returns the pids that it ended."""
    ended = processes.sweep(str(job.private.resolve()))
    compute_services(job).clear()
    remove_files(job.file_tag())
    if own_mode(job.temp):
        shutil.rmtree(job.temp, ignore_errors=True)
    return ended


def is_mapped(segment: Path) -> bool:
    """Whether a running process maps the file; it may belong to a cluster of the same job name in another folder."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(segment) in maps.read_text(encoding="utf-8", errors="surrogateescape"):
                return True
        except OSError:  # the process has ended or belongs to another user
            continue
    return False
