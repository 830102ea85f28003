// The trainer groups of a job, as members and as targets of a restart.

export const TRAINER_GROUPS = new Set(["trainer", "critic", "actor_fwd", "reference"]);

/** The component that an event or alert is about: its kind is `component.what`. */
export const componentOf = ({ kind }) => kind.split(".")[0];
