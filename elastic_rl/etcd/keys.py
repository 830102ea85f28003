"""The whole etcd keyspace of a cluster and its jobs, in one place. No other module builds a key itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from urllib.parse import quote

ROOT = "/elastic_rl"


def write_token(client: str, slot: int) -> str:
    """The token of a client's last write, by which it finds out the outcome when the answer is lost. No job may be
    named ``_tokens``, so it is among no job's keys and seen by no job's watch."""
    return f"{ROOT}/_tokens/{client}/{slot}"


DCS_ROLE = "dcs"
"""Role, among those of members, of the nodes of the checkpoint service, whose records are under another prefix."""


class LeaderKeys(ABC):
    """Keys of what a leader decides about: a job, or the cluster. A method ending in ``_prefix`` names a range, every
    other one a single key."""

    @property
    @abstractmethod
    def root(self) -> str:
        """Prefix of all its keys."""

    def leader_clock(self) -> str:
        """Key of how long there has been a leader, as last written."""
        return f"{self.root}leader_clock"

    def events_prefix(self) -> str:
        return f"{self.root}events/"

    def event(self, event_id: str) -> str:
        return self.events_prefix() + event_id


@dataclass(frozen=True)
class ClusterKeys(LeaderKeys):
    """Keys of a cluster, which outlives its jobs. Several clusters can share an etcd, under different names, as long as
    no two have a job of the same name. No job may be named ``_clusters``, so no job's key is among them."""

    cluster: str = "default"

    @property
    def root(self) -> str:
        return f"{ROOT}/_clusters/{self.cluster}/"

    def leader_prefix(self) -> str:
        """Candidates for leadership, one key per coordinator; the lowest create revision leads."""
        return f"{self.root}leader/"

    def leader(self, replica: str) -> str:
        return self.leader_prefix() + replica

    def session_links_prefix(self) -> str:
        """One-time links to the dashboard, by the digest of their code; leased."""
        return f"{self.root}session_links/"

    def sessions_prefix(self) -> str:
        """Sessions of the dashboard, by the digest of their secret; leased."""
        return f"{self.root}sessions/"

    def hosts_prefix(self) -> str:
        """The registration of each host, written by its agent under its lease."""
        return f"{self.root}hosts/"

    def host(self, host_id: str) -> str:
        return self.hosts_prefix() + host_id

    def host_registrations_prefix(self) -> str:
        """The last registration of each host. Without a lease, so that a decision about an absent host can name it."""
        return f"{self.root}host_registrations/"

    def host_registration(self, host_id: str) -> str:
        return self.host_registrations_prefix() + host_id

    def host_statuses_prefix(self) -> str:
        """What each host's agent reports, under the same lease."""
        return f"{self.root}host_status/"

    def host_status(self, host_id: str) -> str:
        return self.host_statuses_prefix() + host_id

    def host_specs_prefix(self) -> str:
        """What operators want of hosts."""
        return f"{self.root}host_specs/"

    def host_spec(self, host_id: str) -> str:
        return self.host_specs_prefix() + host_id

    def host_states_prefix(self) -> str:
        """What the leader concluded about each host. Without a lease: it outlasts the registration."""
        return f"{self.root}host_states/"

    def host_state(self, host_id: str) -> str:
        return self.host_states_prefix() + host_id

    def assignments_prefix(self) -> str:
        """Which host holds each singleton. A key's version is the assignment's generation."""
        return f"{self.root}assignments/"

    def assignment(self, singleton: str) -> str:
        """The assignment of ``driver/<job>``."""
        return self.assignments_prefix() + singleton

    def jobs_prefix(self) -> str:
        """Jobs as they were submitted."""
        return f"{self.root}jobs/"

    def job(self, job: str) -> str:
        return self.jobs_prefix() + job

    def job_states_prefix(self) -> str:
        """What the leader made of each job."""
        return f"{self.root}job_states/"

    def job_state(self, job: str) -> str:
        return self.job_states_prefix() + job

    def run_statuses_prefix(self) -> str:
        """How the newest submission of each job goes, by its run."""
        return f"{self.root}run_statuses/"

    def run_status(self, job: str) -> str:
        return self.run_statuses_prefix() + job

    def ray_heads_prefix(self) -> str:
        """The head of each job's Ray, by the job's driver."""
        return f"{self.root}ray_heads/"

    def ray_head(self, job: str) -> str:
        return self.ray_heads_prefix() + job

    def submission(self, job: str) -> str:
        """What the newest submission of a job is, sealed: only its run reads it."""
        return f"{self.root}submissions/{job}"

    def spec(self) -> str:
        """What its operator wants of the cluster."""
        return f"{self.root}spec"


@dataclass(frozen=True)
class Keys(LeaderKeys):
    """Keys of one job."""

    job: str

    @property
    def root(self) -> str:
        return f"{ROOT}/{self.job}/"

    # -- control -----------------------------------------------------------------------------------------------
    def epoch(self) -> str:
        """Fencing epoch of the run; raised by each global restart, and by a driver that finds nothing to take over."""
        return f"{self.root}epoch"

    def driver(self) -> str:
        """Fencing generation of the driver; raised by each driver that takes the job over."""
        return f"{self.root}driver"

    def actor_term(self) -> str:
        """Fencing term of the actor; raised by each replica that takes the job over."""
        return f"{self.root}actor_term"

    def formation(self, group: str) -> str:
        """Hosts and size of a trainer group; its version is the formation's number, a fencing token."""
        return f"{self.root}formations/{group}"

    def job_spec(self) -> str:
        """Settings that the job has decided once and keeps; written by its first start."""
        return f"{self.root}spec"

    def job_status(self) -> str:
        return f"{self.root}job"

    def steps_prefix(self) -> str:
        """Metrics of each RL step; old ones are downsampled."""
        return f"{self.root}steps/"

    def step_metrics(self, step: int) -> str:
        return f"{self.steps_prefix()}{step:09d}"

    def run_log_prefix(self) -> str:
        """The records of the run, as far as they are not in the checkpoint service, and where they begin."""
        return f"{self.root}run_log/"

    def run_log_head(self) -> str:
        """Identity of the history, and the offset up to which it is sealed in the stream ``run_log``."""
        return f"{self.run_log_prefix()}head"

    def run_log_segment_prefix(self, start: int) -> str:
        """The bytes of the segment that begins at this offset, while it is not sealed."""
        return f"{self.run_log_prefix()}tail/{start:016d}/"

    def run_log_block(self, start: int, offset: int) -> str:
        """A run of bytes of a segment; ``offset``: of the first one in the history."""
        return f"{self.run_log_segment_prefix(start)}{offset:016d}"

    def samples_prefix(self) -> str:
        """Samples that were trained on, for people: a ring of a fixed number of slots."""
        return f"{self.root}samples/"

    def sample(self, slot: int) -> str:
        return f"{self.samples_prefix()}{slot:03d}"

    def members_prefix(self, role: str = "") -> str:
        return f"{self.root}members/" + (f"{role}/" if role else "")

    def member(self, role: str, member_id: str) -> str:
        return self.members_prefix(role) + member_id

    def heartbeats_prefix(self) -> str:
        """The heartbeats that the agents of hosts have collected; leased."""
        return f"{self.root}heartbeats/"

    def heartbeats(self, host_id: str) -> str:
        """The last heartbeats of the members on a host, one key for all: so many writes are saved."""
        return self.heartbeats_prefix() + host_id

    def registration(self, role: str, member_id: str) -> str:
        """The key under which a member is registered: a DCS node's is that of its record."""
        return self.dcs_node(member_id) if role == DCS_ROLE else self.member(role, member_id)

    def processes_prefix(self, machine: str) -> str:
        """The members' processes on one machine, for its witnesses; each under its member's lease."""
        return f"{self.root}processes/{machine}/"

    def process(self, machine: str, role: str, member_id: str) -> str:
        return f"{self.processes_prefix(machine)}{role}/{member_id}"

    def witnesses_prefix(self) -> str:
        """Processes that watch those of their machine; leased."""
        return f"{self.root}witnesses/"

    def witness(self, machine: str, name: str) -> str:
        return f"{self.witnesses_prefix()}{machine}/{name}"

    def evidence_prefix(self) -> str:
        """What witnesses found out about members that were not deregistered: gone or stopped."""
        return f"{self.root}evidence/"

    def evidence(self, role: str, member_id: str) -> str:
        """There only while the member is not registered: whoever registers deletes it."""
        return f"{self.evidence_prefix()}{role}/{member_id}"

    def pools_prefix(self) -> str:
        return f"{self.root}pools/"

    def pool_spec(self, pool: str) -> str:
        return f"{self.pools_prefix()}{pool}/spec"

    def pool_status(self, pool: str) -> str:
        return f"{self.pools_prefix()}{pool}/status"

    def update_slot(self, pool: str, slot: int) -> str:
        """The engine that has a slot of a rolling update of the pool, and so may pause; under the engine's lease."""
        return f"{self.root}update_slots/{pool}/{slot:05d}"

    def autoscaling_prefix(self) -> str:
        return f"{self.root}autoscaling/"

    def autoscaler(self, pool: str) -> str:
        """Autoscaling of a pool, where it was set through the API."""
        return f"{self.autoscaling_prefix()}{pool}/spec"

    def autoscaler_state(self, pool: str) -> str:
        """What the leader has observed of an autoscaled pool, and when it changed the number."""
        return f"{self.autoscaling_prefix()}{pool}/state"

    def engines_of_pool(self, pool: str) -> str:
        """Prefix of a pool's engines, and of those of pools whose names begin with its name and a hyphen."""
        return f"{self.engines_prefix()}{pool}-"

    def engines_prefix(self) -> str:
        return f"{self.root}engines/"

    def engine(self, engine_id: str) -> str:
        return self.engines_prefix() + engine_id

    def external_engines_prefix(self) -> str:
        """Registered servers that someone else runs."""
        return f"{self.root}external_engines/"

    def external_engine(self, url: str) -> str:
        """One key for each server, so that none is registered twice."""
        return self.external_engines_prefix() + quote(url, safe="")

    def operations_prefix(self) -> str:
        return f"{self.root}operations/"

    def operation(self, operation_id: str) -> str:
        return self.operations_prefix() + operation_id

    def idempotency_prefix(self) -> str:
        """The answer to each Idempotency-Key, kept for a day."""
        return f"{self.root}idempotency/"

    def idempotency(self, digest: str) -> str:
        return self.idempotency_prefix() + digest

    def restarts_prefix(self) -> str:
        return f"{self.root}restarts/"

    def restart(self, target: str) -> str:
        """The restart request for ``target`` (engines/ID, roles/NAME, trainer, job)."""
        return self.restarts_prefix() + target

    def faults_prefix(self) -> str:
        """The failure policy's log of each target: its faults, and the pending action."""
        return f"{self.root}faults/"

    def fault(self, target: str) -> str:
        return self.faults_prefix() + target

    def progress_intervals_prefix(self) -> str:
        """How long each role usually takes between two signs of progress."""
        return f"{self.root}progress_intervals/"

    def progress_intervals(self, role: str) -> str:
        return self.progress_intervals_prefix() + role

    def silences_prefix(self) -> str:
        return f"{self.root}silences/"

    def silence(self, silence_id: str) -> str:
        return self.silences_prefix() + silence_id

    def alerts_prefix(self) -> str:
        return f"{self.root}alerts/"

    def alert(self, condition: str) -> str:
        return self.alerts_prefix() + condition

    def receivers_prefix(self) -> str:
        """The notification queue of each alert receiver: what is being sent, and its recent send rate."""
        return f"{self.root}receivers/"

    def receiver(self, name: str) -> str:
        return self.receivers_prefix() + name

    def leader(self) -> str:
        """The coordinator that decides about the job; under its lease, so the key is gone while none does."""
        return f"{self.root}leader"

    def leader_problem(self) -> str:
        """What keeps the leader from deciding about the job; under its lease, and only while there is something."""
        return f"{self.root}leader_problem"

    def leader_heartbeat(self) -> str:
        """The leader's last heartbeat, from which the next leader knows how long there was none."""
        return f"{self.root}leader_heartbeat"

    def registry_prefix(self) -> str:
        """The member registry. A member that has an entry here and no key under ``members`` has died; one that closes
        cleanly deletes both keys in one transaction."""
        return f"{self.root}registry/"

    def registry_entry(self, role: str, member_id: str) -> str:
        return f"{self.registry_prefix()}{role}/{member_id}"

    def leadership(self) -> str:
        """The leader that was announced last, so that each term is announced once."""
        return f"{self.root}leadership"

    def event_cursor(self) -> str:
        """Revision up to which the leader has processed events."""
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

    def replica_sets_prefix(self, stream: str) -> str:
        return f"{self.root}dcs/replica_sets/{stream}/"

    def replica_sets(self, stream: str, number: int) -> str:
        """Which nodes hold which part of a committed version. Not in the version's record, which every engine watches:
        those of a version of 1,000 hosts are some 50 KB."""
        return f"{self.replica_sets_prefix(stream)}{number:012d}"

    def staging_owner(self, stream: str, number: int) -> str:
        """Leased by the publisher; the version is aborted when it expires."""
        return f"{self.root}dcs/staging/{stream}/{number:012d}"

    def pins_prefix(self, stream: str, number: int | None = None) -> str:
        return f"{self.root}dcs/pins/{stream}/" + (f"{number:012d}/" if number is not None else "")

    def pin(self, stream: str, number: int, holder: str) -> str:
        return self.pins_prefix(stream, number) + holder

    def durable_prefix(self, stream: str) -> str:
        """One key per version that is in the durable store."""
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
    def group_leases_prefix(self) -> str:
        return f"{self.root}groups/"

    def group_lease(self, producer: str) -> str:
        """The prompt groups that a producer works on."""
        return f"{self.group_leases_prefix()}{producer}"

    def output(self) -> str:
        """What a job that trains nothing has written."""
        return f"{self.root}output"

    # -- colocated placement ----------------------------------------------------------------------------------------
    def device_phase(self) -> str:
        """Key of the device phase: which side may have the memory of the devices that engines and trainer share."""
        return f"{self.root}device/phase"

    def device_holder(self) -> str:
        """The formation of the trainer group that has device memory; absent while none has."""
        return f"{self.root}device/holder"

    def shared_devices(self) -> str:
        """The GPUs that engines and trainer share, and their hosts."""
        return f"{self.root}device/gpus"

    # -- torch elastic ------------------------------------------------------------------------------------------
    def rendezvous_prefix(self) -> str:
        return f"{self.root}rendezvous/"

    def rendezvous_of_group(self, group: str) -> str:
        """The agents of a trainer group meet below this prefix, in each of its formations."""
        return f"{self.rendezvous_prefix()}{group}-"
