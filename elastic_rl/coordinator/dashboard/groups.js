// The trainer groups of a job, as members and as targets of a restart.

export const GROUPS = new Set(["trainer", "critic", "actor_fwd", "reference"]);

/** The part that an event or alert is about: its kind is `part.what`. */
export const partOf = ({ kind }) => kind.split(".")[0];
