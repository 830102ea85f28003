// The trainer groups of a job, as members and as targets of a restart.

export const GROUPS = new Set(["trainer", "critic", "actor_fwd", "reference"]);
