"""The whole etcd keyspace of a job, in one place. Every other module asks here for a key and builds none itself."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

ROOT = "/elastic_rl"


def token(client: str, slot: int) -> str:
    """Where a store client leaves the token of its last write, so that a lost answer can be read back. No job may be
    named ``_tokens``, so it meets no job's keys and no job's watch."""
    return f"{ROOT}/_tokens/{client}/{slot}"


@dataclass(frozen=True)
class Keys:
    """Keys of one job. A method ending in ``_prefix`` names a range, every other one a single key."""

    job: str

    @property
    def root(self) -> str:
        return f"{ROOT}/{self.job}/"

    # -- control -----------------------------------------------------------------------------------------------
    def leader_prefix(self) -> str:
        """Candidates for the leadership, one key a replica; the lowest create revision leads."""
        return f"{self.root}leader/"

    def leader(self, replica: str) -> str:
        return self.leader_prefix() + replica

    def epoch(self) -> str:
        """Fencing epoch of the run; raised by each driver start and global restart."""
        return f"{self.root}epoch"

    def job_status(self) -> str:
        return f"{self.root}job"

    def steps_prefix(self) -> str:
        """Points of the run's curves."""
        return f"{self.root}steps/"

    def step_point(self, step: int) -> str:
        return f"{self.steps_prefix()}{step:09d}"

    def members_prefix(self, role: str = "") -> str:
        return f"{self.root}members/" + (f"{role}/" if role else "")

    def member(self, role: str, member_id: str) -> str:
        return self.members_prefix(role) + member_id

    def pools_prefix(self) -> str:
        return f"{self.root}pools/"

    def pool_spec(self, pool: str) -> str:
        return f"{self.pools_prefix()}{pool}/spec"

    def pool_status(self, pool: str) -> str:
        return f"{self.pools_prefix()}{pool}/status"

    def engines_prefix(self) -> str:
        return f"{self.root}engines/"

    def engine(self, engine_id: str) -> str:
        return self.engines_prefix() + engine_id

    def adoptions_prefix(self) -> str:
        """Servers that others run and that shall take part."""
        return f"{self.root}adoptions/"

    def adoption(self, url: str) -> str:
        """One key a server, so that none takes part twice."""
        return self.adoptions_prefix() + quote(url, safe="")

    def operations_prefix(self) -> str:
        return f"{self.root}operations/"

    def operation(self, operation_id: str) -> str:
        return self.operations_prefix() + operation_id

    def idempotency_prefix(self) -> str:
        """What each Idempotency-Key led to, for a day."""
        return f"{self.root}idempotency/"

    def idempotency(self, digest: str) -> str:
        return self.idempotency_prefix() + digest

    def restarts_prefix(self) -> str:
        return f"{self.root}restarts/"

    def restart(self, target: str) -> str:
        """The wish that ``target`` (engines/ID, roles/NAME, trainer, job) is started anew."""
        return self.restarts_prefix() + target

    def faults_prefix(self) -> str:
        """What the failure policy remembers of each part: when it failed, and how far the run was then."""
        return f"{self.root}faults/"

    def fault(self, target: str) -> str:
        return self.faults_prefix() + target

    def paces_prefix(self) -> str:
        """How long each role usually takes between two signs of progress."""
        return f"{self.root}paces/"

    def pace(self, role: str) -> str:
        return self.paces_prefix() + role

    def silences_prefix(self) -> str:
        return f"{self.root}silences/"

    def silence(self, silence_id: str) -> str:
        return self.silences_prefix() + silence_id

    def events_prefix(self) -> str:
        return f"{self.root}events/"

    def event(self, event_id: str) -> str:
        return self.events_prefix() + event_id

    def alerts_prefix(self) -> str:
        return f"{self.root}alerts/"

    def alert(self, condition: str) -> str:
        return self.alerts_prefix() + condition

    def receivers_prefix(self) -> str:
        """A mailbox for each receiver of alerts: what is on its way to it, and how fast it was sent to."""
        return f"{self.root}receivers/"

    def receiver(self, name: str) -> str:
        return self.receivers_prefix() + name

    def leader_alive(self) -> str:
        """The last leader's sign of life, by which the next one sees how long there was none."""
        return f"{self.root}leader_alive"

    def roster_prefix(self) -> str:
        """Members that the leader has seen. A member that is here and no longer under ``members`` has died; one that
        closes cleanly deletes both keys in one transaction."""
        return f"{self.root}roster/"

    def roster(self, role: str, member_id: str) -> str:
        return f"{self.roster_prefix()}{role}/{member_id}"

    def leadership(self) -> str:
        """The replica whose leadership was last announced, so that each one is announced once."""
        return f"{self.root}leadership"

    def event_cursor(self) -> str:
        """Revision up to which the leader has turned events into alerts."""
        return f"{self.root}cursor"

    # -- checkpoint service -------------------------------------------------------------------------------------
    def dcs_nodes_prefix(self) -> str:
        return f"{self.root}dcs/nodes/"

    def dcs_node(self, node_id: str) -> str:
        return self.dcs_nodes_prefix() + node_id

    def dcs_catalog(self) -> str:
        """Identity of the catalog of versions, and how many commits it has seen."""
        return f"{self.root}dcs/catalog"

    def stream_next(self, stream: str) -> str:
        return f"{self.root}dcs/streams/{stream}/next"

    def stream_head(self, stream: str) -> str:
        return f"{self.root}dcs/streams/{stream}/head"

    def streams_prefix(self) -> str:
        return f"{self.root}dcs/streams/"

    def versions_prefix(self, stream: str) -> str:
        return f"{self.root}dcs/streams/{stream}/versions/"

    def version(self, stream: str, number: int) -> str:
        return f"{self.versions_prefix(stream)}{number:012d}"

    def placement(self, stream: str, number: int) -> str:
        """Which nodes hold which part of a committed version. Not in the version's record, which every engine watches:
        a version of 1,000 hosts has a placement of some 50 KB."""
        return f"{self.root}dcs/placements/{stream}/{number:012d}"

    def staging_owner(self, stream: str, number: int) -> str:
        """Leased by the publisher; when it is gone the version is aborted."""
        return f"{self.root}dcs/staging/{stream}/{number:012d}"

    def pins_prefix(self, stream: str, number: int | None = None) -> str:
        return f"{self.root}dcs/pins/{stream}/" + (f"{number:012d}/" if number is not None else "")

    def pin(self, stream: str, number: int, holder: str) -> str:
        return self.pins_prefix(stream, number) + holder

    def durable_prefix(self, stream: str) -> str:
        """One key for each version that is in the durable store."""
        return f"{self.root}dcs/durable/{stream}/"

    def durable(self, stream: str, number: int) -> str:
        return f"{self.durable_prefix(stream)}{number:012d}"

    def durable_parts_prefix(self) -> str:
        """One key for each part of the version being copied to the durable store that is there already."""
        return f"{self.root}dcs/durable_parts/"

    def durable_failing(self) -> str:
        """There while a failure to copy to the durable store is reported, so that whichever node copies again can
        report the end of it."""
        return f"{self.root}dcs/durable_failing"

    def durable_part(self, part: int) -> str:
        return f"{self.durable_parts_prefix()}{part:06d}"

    def uploader(self) -> str:
        """Which version is copied to the durable store now; leased by the node that chose it."""
        return f"{self.root}dcs/uploader"

    # -- experience ---------------------------------------------------------------------------------------------
    def ledger_prefix(self) -> str:
        return f"{self.root}ledger/"

    def ledger(self, step: int) -> str:
        return f"{self.ledger_prefix()}{step:09d}"

    # -- torch elastic ------------------------------------------------------------------------------------------
    def rendezvous_prefix(self) -> str:
        return f"{self.root}rendezvous/"
