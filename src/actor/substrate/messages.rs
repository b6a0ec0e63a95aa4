//! The messages of Agent Substrate's control plane that are used here, with the fields that are used.
//!
//! They are our own, by the numbers of commit 533900d8 (2026); what a server sends besides is skipped. The
//! interface is young and changes, see [`super::SubstrateApi`].

use std::collections::HashMap;

/// Names an object.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ObjectRef {
    /// The atespace that it is in.
    #[prost(string, tag = "1")]
    pub atespace: String,
    /// Its name there.
    #[prost(string, tag = "2")]
    pub name: String,
}

/// What all objects have.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Metadata {
    /// The atespace.
    #[prost(string, tag = "1")]
    pub atespace: String,
    /// The name.
    #[prost(string, tag = "2")]
    pub name: String,
}

/// An actor.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Actor {
    /// Its name.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<Metadata>,
    /// What it is made of.
    #[prost(message, optional, tag = "4")]
    pub actor_template: Option<ObjectRef>,
    /// What it starts from, if not from its template.
    #[prost(message, optional, tag = "6")]
    pub source_tag: Option<ObjectRef>,
    /// How it is.
    #[prost(message, optional, tag = "7")]
    pub status: Option<ActorStatus>,
}

/// How an actor is.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ActorStatus {
    /// Its state, see [`super::ActorState`].
    #[prost(int32, tag = "1")]
    pub state: i32,
    /// Why it crashed, if it did.
    #[prost(message, optional, tag = "9")]
    pub crash: Option<Crash>,
}

/// Why an actor crashed.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Crash {
    /// For people.
    #[prost(string, tag = "1")]
    pub message: String,
}

/// Asks for a new actor.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CreateActorRequest {
    /// The actor.
    #[prost(message, optional, tag = "1")]
    pub actor: Option<Actor>,
}

/// Names an actor, to get, resume or suspend it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ActorRequest {
    /// The actor.
    #[prost(message, optional, tag = "1")]
    pub actor: Option<ObjectRef>,
}

/// What comes of resuming and suspending.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ActorResponse {
    /// The actor.
    #[prost(message, optional, tag = "1")]
    pub actor: Option<Actor>,
}

/// Asks for the end of an actor.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct DeleteActorRequest {
    /// The actor.
    #[prost(message, optional, tag = "1")]
    pub actor: Option<ObjectRef>,
    /// Whatever its state is.
    #[prost(bool, tag = "2")]
    pub any_state: bool,
}

/// Asks for a page of a list.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListRequest {
    /// The atespace.
    #[prost(string, tag = "1")]
    pub atespace: String,
    /// Objects of a page, 1000 at most.
    #[prost(int32, tag = "2")]
    pub page_size: i32,
    /// Where it goes on.
    #[prost(string, tag = "3")]
    pub page_token: String,
}

/// A page of actors.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListActorsResponse {
    /// The actors.
    #[prost(message, repeated, tag = "1")]
    pub actors: Vec<Actor>,
    /// Where it goes on; empty at the end.
    #[prost(string, tag = "2")]
    pub next_page_token: String,
}

/// What an actor may reach: with no rule, nothing.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct EgressPolicy {
    /// Its name, which must be `default`.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<Metadata>,
}

/// Asks for a policy of an actor.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CreateEgressPolicyRequest {
    /// The actor.
    #[prost(message, optional, tag = "1")]
    pub actor: Option<ObjectRef>,
    /// The policy.
    #[prost(message, optional, tag = "2")]
    pub egress_policy: Option<EgressPolicy>,
}

/// A snapshot with a name, from which any number of actors start.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Tag {
    /// Its name.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<Metadata>,
    /// How it is.
    #[prost(message, optional, tag = "2")]
    pub status: Option<TagStatus>,
    /// Who may use it: 1 is its atespace.
    #[prost(int32, tag = "3")]
    pub scope: i32,
    /// The suspended actor whose snapshot it copies.
    #[prost(message, optional, tag = "4")]
    pub source_actor: Option<ObjectRef>,
}

/// How a tag is.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct TagStatus {
    /// Where the snapshot is, once it is there.
    #[prost(message, optional, tag = "1")]
    pub snapshot: Option<ExternalSnapshot>,
}

/// Where a snapshot is.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ExternalSnapshot {
    /// Its address.
    #[prost(string, tag = "1")]
    pub snapshot_uri: String,
}

/// Asks for a tag.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CreateTagRequest {
    /// The tag.
    #[prost(message, optional, tag = "1")]
    pub tag: Option<Tag>,
}

/// Names a tag, to get or delete it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct TagRequest {
    /// The tag.
    #[prost(message, optional, tag = "1")]
    pub tag: Option<ObjectRef>,
}

/// A page of tags.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ListTagsResponse {
    /// The tags.
    #[prost(message, repeated, tag = "1")]
    pub tags: Vec<Tag>,
    /// Where it goes on; empty at the end.
    #[prost(string, tag = "2")]
    pub next_page_token: String,
}

/// What actors are made of.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ActorTemplate {
    /// Its name.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<Metadata>,
    /// Which workers may run them.
    #[prost(message, optional, tag = "2")]
    pub worker_selector: Option<Selector>,
    /// What runs in them.
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<Container>,
    /// What is mounted.
    #[prost(message, repeated, tag = "4")]
    pub volumes: Vec<Volume>,
    /// What snapshots hold, and where they are.
    #[prost(message, optional, tag = "5")]
    pub snapshot_config: Option<SnapshotConfig>,
    /// What keeps them apart.
    #[prost(message, optional, tag = "6")]
    pub sandbox_config: Option<SandboxConfig>,
    /// What they may use.
    #[prost(message, optional, tag = "7")]
    pub resources: Option<Resources>,
    /// How it is.
    #[prost(message, optional, tag = "8")]
    pub status: Option<ActorTemplateStatus>,
}

/// Labels that a worker must have.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Selector {
    /// The labels.
    #[prost(map = "string, string", tag = "1")]
    pub match_labels: HashMap<String, String>,
}

/// A program of an actor.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Container {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its image, by digest.
    #[prost(string, tag = "2")]
    pub image: String,
    /// The program and its arguments.
    #[prost(string, repeated, tag = "3")]
    pub command: Vec<String>,
    /// Its variables.
    #[prost(message, repeated, tag = "5")]
    pub env: Vec<Variable>,
    /// When it is there.
    #[prost(message, optional, tag = "6")]
    pub wakeup_probe: Option<WakeupProbe>,
    /// What it sees of the volumes.
    #[prost(message, repeated, tag = "7")]
    pub volume_mounts: Vec<VolumeMount>,
}

/// A variable.
#[derive(Clone, PartialEq, Eq, prost::Message)]
#[prost(skip_debug)]
pub struct Variable {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its value, which may be secret.
    #[prost(string, tag = "2")]
    pub value: String,
}

impl std::fmt::Debug for Variable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Variable")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// What a program answers once it is there.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct WakeupProbe {
    /// The request.
    #[prost(message, optional, tag = "1")]
    pub http_get: Option<HttpGet>,
    /// How long it may take, in seconds.
    #[prost(int32, tag = "2")]
    pub timeout_seconds: i32,
}

/// A request.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HttpGet {
    /// The path.
    #[prost(string, tag = "1")]
    pub path: String,
    /// The port.
    #[prost(int32, tag = "2")]
    pub port: i32,
}

/// Where a volume is seen.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct VolumeMount {
    /// The volume.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The folder.
    #[prost(string, tag = "2")]
    pub mount_path: String,
}

/// A volume.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Volume {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The image that it shows, to read.
    #[prost(message, optional, tag = "6")]
    pub image: Option<ImageVolume>,
}

/// An image as a volume.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ImageVolume {
    /// The image, by digest.
    #[prost(string, tag = "1")]
    pub reference: String,
}

/// What snapshots hold, and where they are.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SnapshotConfig {
    /// 1 is memory, processes and files; 2 durable folders alone.
    #[prost(int32, tag = "2")]
    pub on_commit: i32,
    /// An address of a store of objects.
    #[prost(string, tag = "4")]
    pub storage_location: String,
}

/// What keeps actors apart.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SandboxConfig {
    /// 1 is gVisor.
    #[prost(int32, tag = "1")]
    pub sandbox_class: i32,
    /// The cluster's object that says how.
    #[prost(string, tag = "2")]
    pub config_name: String,
}

/// What may be used.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Resources {
    /// The limits.
    #[prost(message, repeated, tag = "1")]
    pub limits: Vec<Limit>,
}

/// A limit.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Limit {
    /// `cpu` or `memory`.
    #[prost(string, tag = "1")]
    pub name: String,
    /// As Kubernetes writes it.
    #[prost(string, tag = "2")]
    pub quantity: String,
}

/// How a template is.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ActorTemplateStatus {
    /// The snapshot that its actors start from.
    #[prost(message, optional, tag = "1")]
    pub golden_snapshot_status: Option<GoldenSnapshotStatus>,
}

/// The snapshot that a template's actors start from.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GoldenSnapshotStatus {
    /// Its tag, once it is there.
    #[prost(message, optional, tag = "1")]
    pub golden_tag: Option<ObjectRef>,
    /// Why it will never be there.
    #[prost(string, tag = "3")]
    pub error_message: String,
}

/// Asks for a template.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateActorTemplateRequest {
    /// The template.
    #[prost(message, optional, tag = "1")]
    pub actor_template: Option<ActorTemplate>,
}

/// Names a template, to get or delete it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ActorTemplateRequest {
    /// The template.
    #[prost(message, optional, tag = "1")]
    pub actor_template: Option<ObjectRef>,
}

/// A page of templates.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListActorTemplatesResponse {
    /// The templates.
    #[prost(message, repeated, tag = "1")]
    pub actor_templates: Vec<ActorTemplate>,
    /// Where it goes on; empty at the end.
    #[prost(string, tag = "2")]
    pub next_page_token: String,
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    /// Returns the numbers of the fields that are set.
    fn numbers(mut bytes: &[u8]) -> Vec<u64> {
        let mut numbers = Vec::new();
        while !bytes.is_empty() {
            let key = prost::encoding::decode_varint(&mut bytes).unwrap();
            numbers.push(key >> 3);
            let value = prost::encoding::decode_varint(&mut bytes).unwrap();
            if key & 7 == 2 {
                bytes = &bytes[usize::try_from(value).unwrap()..];
            }
        }
        numbers
    }

    /// Numbers are what a server goes by, and both sides of our tests have the same.
    #[test]
    fn fields_have_their_numbers() {
        let text = || "x".to_owned();
        let reference = || {
            Some(ObjectRef {
                atespace: text(),
                name: text(),
            })
        };
        let metadata = || {
            Some(Metadata {
                atespace: text(),
                name: text(),
            })
        };
        let actor = Actor {
            metadata: metadata(),
            actor_template: reference(),
            source_tag: reference(),
            status: Some(ActorStatus::default()),
        };
        let status = ActorStatus {
            state: 7,
            crash: Some(Crash { message: text() }),
        };
        let delete = DeleteActorRequest {
            actor: reference(),
            any_state: true,
        };
        let tag = Tag {
            metadata: metadata(),
            status: Some(TagStatus::default()),
            scope: 1,
            source_actor: reference(),
        };
        let template = ActorTemplate {
            metadata: metadata(),
            worker_selector: Some(Selector::default()),
            containers: vec![Container::default()],
            volumes: vec![Volume::default()],
            snapshot_config: Some(SnapshotConfig::default()),
            sandbox_config: Some(SandboxConfig::default()),
            resources: Some(Resources::default()),
            status: Some(ActorTemplateStatus::default()),
        };
        let container = Container {
            name: text(),
            image: text(),
            command: vec![text()],
            env: vec![Variable::default()],
            wakeup_probe: Some(WakeupProbe::default()),
            volume_mounts: vec![VolumeMount::default()],
        };
        let volume = Volume {
            name: text(),
            image: Some(ImageVolume::default()),
        };
        let snapshot = SnapshotConfig {
            on_commit: 1,
            storage_location: text(),
        };
        let golden = GoldenSnapshotStatus {
            golden_tag: reference(),
            error_message: text(),
        };
        let policy = CreateEgressPolicyRequest {
            actor: reference(),
            egress_policy: Some(EgressPolicy::default()),
        };
        let list = ListRequest {
            atespace: text(),
            page_size: 1,
            page_token: text(),
        };
        for (bytes, expected) in [
            (reference().unwrap().encode_to_vec(), &[1, 2][..]),
            (metadata().unwrap().encode_to_vec(), &[1, 2]),
            (actor.encode_to_vec(), &[1, 4, 6, 7]),
            (status.encode_to_vec(), &[1, 9]),
            (delete.encode_to_vec(), &[1, 2]),
            (tag.encode_to_vec(), &[1, 2, 3, 4]),
            (template.encode_to_vec(), &[1, 2, 3, 4, 5, 6, 7, 8]),
            (container.encode_to_vec(), &[1, 2, 3, 5, 6, 7]),
            (volume.encode_to_vec(), &[1, 6]),
            (snapshot.encode_to_vec(), &[2, 4]),
            (golden.encode_to_vec(), &[1, 3]),
            (policy.encode_to_vec(), &[1, 2]),
            (list.encode_to_vec(), &[1, 2, 3]),
        ] {
            assert_eq!(numbers(&bytes), expected);
        }
    }

    #[test]
    fn what_a_newer_server_sends_besides_is_skipped() {
        let actor = Actor {
            metadata: Some(Metadata {
                atespace: "a".to_owned(),
                name: "n".to_owned(),
            }),
            ..Actor::default()
        };
        // Field 100, three bytes; field 5, a number.
        let more = [
            &actor.encode_to_vec()[..],
            &[0xa2, 0x06, 3, 1, 2, 3, 0x28, 9],
        ]
        .concat();
        assert_eq!(Actor::decode(&more[..]).unwrap(), actor);
    }
}
