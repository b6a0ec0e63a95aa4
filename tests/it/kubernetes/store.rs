//! What an API server keeps: objects with versions, who owns which field, and the events of the last changes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use jiff::Timestamp;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

/// Events that are kept; watches from before are told that they are too old.
const HISTORY: usize = 500;

/// A kind that the server knows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) group_version: &'static str,
    pub(super) kind: &'static str,
    pub(super) plural: &'static str,
}

impl Kind {
    pub(super) fn group(&self) -> &'static str {
        self.group_version
            .rsplit_once('/')
            .map_or("", |(group, _)| group)
    }

    /// Names are unique in a group and a plural, whatever the version.
    fn place(&self) -> String {
        format!("{}/{}", self.group(), self.plural)
    }
}

pub(super) const fn kind(
    group_version: &'static str,
    kind: &'static str,
    plural: &'static str,
) -> Kind {
    Kind {
        group_version,
        kind,
        plural,
    }
}

pub(super) const POD: Kind = kind("v1", "Pod", "pods");
pub(super) const LEASE: Kind = kind("coordination.k8s.io/v1", "Lease", "leases");
pub(super) const POLICY: Kind = kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies");
pub(super) const REVIEW: Kind = kind(
    "authorization.k8s.io/v1",
    "SelfSubjectAccessReview",
    "selfsubjectaccessreviews",
);
pub(super) const KRUISE_SET: Kind = kind("agents.kruise.io/v1alpha1", "SandboxSet", "sandboxsets");
pub(super) const KRUISE_CLAIM: Kind =
    kind("agents.kruise.io/v1alpha1", "SandboxClaim", "sandboxclaims");
pub(super) const KRUISE_SANDBOX: Kind = kind("agents.kruise.io/v1alpha1", "Sandbox", "sandboxes");
pub(super) const SIG_SANDBOX: Kind = kind("agents.x-k8s.io/v1beta1", "Sandbox", "sandboxes");
pub(super) const SIG_TEMPLATE: Kind = kind(
    "extensions.agents.x-k8s.io/v1beta1",
    "SandboxTemplate",
    "sandboxtemplates",
);
pub(super) const SIG_POOL: Kind = kind(
    "extensions.agents.x-k8s.io/v1beta1",
    "SandboxWarmPool",
    "sandboxwarmpools",
);
pub(super) const SIG_CLAIM: Kind = kind(
    "extensions.agents.x-k8s.io/v1beta1",
    "SandboxClaim",
    "sandboxclaims",
);

pub(super) const JOB: Kind = kind("batch/v1", "Job", "jobs");
pub(super) const CONFIG_MAP: Kind = kind("v1", "ConfigMap", "configmaps");

/// All kinds: the same kind and plural stand in several groups.
pub(super) const KINDS: [Kind; 13] = [
    JOB,
    CONFIG_MAP,
    POD,
    LEASE,
    POLICY,
    REVIEW,
    KRUISE_SET,
    KRUISE_CLAIM,
    KRUISE_SANDBOX,
    SIG_SANDBOX,
    SIG_TEMPLATE,
    SIG_POOL,
    SIG_CLAIM,
];

#[derive(Debug, Clone)]
pub(super) struct Event {
    pub(super) version: u64,
    pub(super) what: &'static str,
    pub(super) place: String,
    pub(super) object: Value,
}

/// An error as the server says it.
pub(super) type Refusal = Value;

#[derive(Debug)]
pub(super) struct Store {
    objects: BTreeMap<(String, String), Value>,
    /// Who has applied which field of which object.
    managers: BTreeMap<(String, String), BTreeMap<String, String>>,
    events: VecDeque<Event>,
    version: u64,
    uids: u64,
    changed: watch::Sender<u64>,
}

impl Store {
    pub(super) fn new() -> Self {
        Self {
            objects: BTreeMap::new(),
            managers: BTreeMap::new(),
            events: VecDeque::new(),
            version: 100,
            uids: 0,
            changed: watch::channel(100).0,
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(super) fn get(&self, kind: &Kind, name: &str) -> Option<&Value> {
        self.objects.get(&(kind.place(), name.to_owned()))
    }

    pub(super) fn list(&self, kind: &Kind) -> Vec<Value> {
        let place = kind.place();
        self.objects
            .iter()
            .filter(|((found, _), _)| *found == place)
            .map(|(_, object)| object.clone())
            .collect()
    }

    /// Returns the names of all objects, for what must be left: nothing.
    pub(super) fn names(&self) -> Vec<String> {
        self.objects
            .keys()
            .map(|(place, name)| format!("{place}/{name}"))
            .collect()
    }

    /// Returns the events of a kind after a version, unless they are not known any more.
    pub(super) fn events_after(&self, kind: &Kind, version: u64) -> Option<Vec<Event>> {
        let oldest = self
            .events
            .front()
            .map_or(self.version, |event| event.version - 1);
        if version < oldest {
            return None;
        }
        let place = kind.place();
        let events = self.events.iter();
        Some(
            events
                .filter(|event| event.version > version && event.place == place)
                .cloned()
                .collect(),
        )
    }

    /// Forgets all events: what was watched is too old.
    pub(super) fn forget_events(&mut self) {
        self.version += 1;
        self.events.clear();
        self.changed.send_replace(self.version);
    }

    fn record(&mut self, what: &'static str, kind: &Kind, object: Value) {
        self.events.push_back(Event {
            version: self.version,
            what,
            place: kind.place(),
            object,
        });
        if self.events.len() > HISTORY {
            self.events.pop_front();
        }
        self.changed.send_replace(self.version);
    }

    pub(super) fn create(&mut self, kind: &Kind, mut object: Value) -> Result<Value, Refusal> {
        if let Some(problem) = wrong_replicas(&object) {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            return Err(invalid(kind, name, &problem));
        }
        if object["metadata"]["name"].is_null() {
            let prefix = object["metadata"]["generateName"]
                .as_str()
                .unwrap_or_default();
            let name = format!("{prefix}{:05x}", self.uids * 7919 % 0xfffff);
            object["metadata"]["name"] = name.into();
        }
        let name = object["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let place = (kind.place(), name.clone());
        if self.objects.contains_key(&place) {
            let message = format!("{} \"{name}\" already exists", full(kind));
            return Err(status(
                409,
                "AlreadyExists",
                &message,
                Some(details(kind, &name)),
            ));
        }
        self.version += 1;
        self.uids += 1;
        let metadata = &mut object["metadata"];
        metadata["uid"] = format!("00000000-0000-4000-8000-{:012x}", self.uids).into();
        metadata["creationTimestamp"] = Timestamp::now()
            .strftime("%Y-%m-%dT%H:%M:%SZ")
            .to_string()
            .into();
        metadata["generation"] = 1.into();
        metadata["namespace"] = super::NAMESPACE.into();
        metadata["resourceVersion"] = self.version.to_string().into();
        object["apiVersion"] = kind.group_version.into();
        object["kind"] = kind.kind.into();
        self.objects.insert(place, object.clone());
        self.record("ADDED", kind, object.clone());
        Ok(object)
    }

    /// Changes an object that is there.
    pub(super) fn update(
        &mut self,
        kind: &Kind,
        name: &str,
        change: impl FnOnce(&mut Value),
    ) -> Option<Value> {
        let place = (kind.place(), name.to_owned());
        let before = self.objects.get(&place)?.clone();
        let mut object = before.clone();
        change(&mut object);
        if object == before {
            return Some(object);
        }
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.objects.insert(place, object.clone());
        self.record("MODIFIED", kind, object.clone());
        Some(object)
    }

    /// Server-side apply. Fields that a manager leaves out stay; a real server removes them.
    pub(super) fn apply(
        &mut self,
        kind: &Kind,
        name: &str,
        manager: &str,
        force: bool,
        patch: &Value,
    ) -> Result<(bool, Value), Refusal> {
        if let Some(problem) = wrong_replicas(patch) {
            let message = format!(
                "failed to create typed patch object ({}/{name}; {}, Kind={}): .spec.replicas: expected numeric \
                 (int or float), got {problem}",
                super::NAMESPACE,
                kind.group_version,
                kind.kind
            );
            return Err(status(500, "", &message, None));
        }
        let place = (kind.place(), name.to_owned());
        let mut leaves = BTreeMap::new();
        for part in ["metadata", "spec"] {
            collect_leaves(&patch[part], &format!(".{part}"), &mut leaves);
        }
        leaves.remove(".metadata.name");
        let owned = self.managers.entry(place.clone()).or_default();
        let found = self.objects.get(&place);
        let conflicts: BTreeMap<&String, &String> = leaves
            .iter()
            .filter_map(|(path, value)| {
                let other = owned.get(path).filter(|other| *other != manager)?;
                let now = found.and_then(|object| object.pointer(&path.replace('.', "/")));
                (now != Some(*value)).then_some((path, other))
            })
            .collect();
        if let (Some((path, other)), false) = (conflicts.first_key_value(), force) {
            let cause = format!("conflict with \"{other}\" using {}", kind.group_version);
            let message = format!("Apply failed with 1 conflict: {cause}: {path}");
            let details = json!({ "causes": [
                { "reason": "FieldManagerConflict", "message": cause, "field": path },
            ] });
            return Err(status(409, "Conflict", &message, Some(details)));
        }
        for path in leaves.keys() {
            owned.insert(path.clone(), manager.to_owned());
        }
        if found.is_none() {
            return self
                .create(kind, patch.clone())
                .map(|object| (true, object));
        }
        let object = self.update(kind, name, |object| merge(object, patch, true));
        Ok((false, object.unwrap_or_default()))
    }

    /// Deletes an object and all that nobody else owns.
    pub(super) fn delete(&mut self, kind: &Kind, name: &str) -> Result<Value, Refusal> {
        let place = (kind.place(), name.to_owned());
        let Some(mut object) = self.objects.remove(&place) else {
            return Err(not_found(kind, name));
        };
        self.managers.remove(&place);
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let uid = object["metadata"]["uid"].clone();
        self.record("DELETED", kind, object);
        let living: BTreeSet<String> = self
            .objects
            .values()
            .map(|object| object["metadata"]["uid"].to_string())
            .collect();
        let orphans: Vec<(String, String)> = self
            .objects
            .iter()
            .filter(|(_, object)| {
                let owners = object["metadata"]["ownerReferences"].as_array();
                owners.is_some_and(|owners| {
                    owners.iter().any(|owner| owner["uid"] == uid)
                        && !owners
                            .iter()
                            .any(|owner| living.contains(&owner["uid"].to_string()))
                })
            })
            .map(|(place, _)| place.clone())
            .collect();
        for (place, name) in orphans {
            if let Some(kind) = KINDS.iter().find(|kind| kind.place() == place) {
                let _ = self.delete(kind, &name);
            }
        }
        let mut details = details(kind, place.1.as_str());
        details["uid"] = uid;
        Ok(json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details,
        }))
    }
}

/// Returns what `spec.replicas` is, where it is no number.
fn wrong_replicas(object: &Value) -> Option<String> {
    match object.pointer("/spec/replicas")? {
        Value::String(_) => Some("string".to_owned()),
        _ => None,
    }
}

fn invalid(kind: &Kind, name: &str, problem: &str) -> Refusal {
    let cause = format!(
        "Invalid value: \"{problem}\": spec.replicas in body must be of type integer: \"{problem}\""
    );
    let message = format!(
        "{}.{} \"{name}\" is invalid: [spec.replicas: {cause}]",
        kind.kind,
        kind.group()
    );
    let mut details = details(kind, name);
    details["kind"] = kind.kind.into();
    details["causes"] = json!([
        { "reason": "FieldValueTypeInvalid", "message": cause, "field": "spec.replicas" },
    ]);
    status(422, "Invalid", &message, Some(details))
}

/// Merges a patch: a JSON merge patch, or an apply, in which owners are a set.
pub(super) fn merge(target: &mut Value, patch: &Value, is_apply: bool) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    for (name, value) in patch {
        match value {
            Value::Null if !is_apply => {
                target.as_object_mut().unwrap().shift_remove(name);
            }
            Value::Array(new) if is_apply && name == "ownerReferences" => {
                let mut all = target[name].as_array().cloned().unwrap_or_default();
                all.retain(|old| !new.iter().any(|new| new["uid"] == old["uid"]));
                all.extend(new.iter().cloned());
                target[name] = all.into();
            }
            value => merge(&mut target[name.as_str()], value, is_apply),
        }
    }
}

fn collect_leaves<'a>(value: &'a Value, path: &str, leaves: &mut BTreeMap<String, &'a Value>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                collect_leaves(value, &format!("{path}.{name}"), leaves);
            }
        }
        Value::Null => {}
        value => {
            leaves.insert(path.to_owned(), value);
        }
    }
}

fn full(kind: &Kind) -> String {
    match kind.group() {
        "" => kind.plural.to_owned(),
        group => format!("{}.{group}", kind.plural),
    }
}

fn details(kind: &Kind, name: &str) -> Value {
    match kind.group() {
        "" => json!({ "name": name, "kind": kind.plural }),
        group => json!({ "name": name, "group": group, "kind": kind.plural }),
    }
}

pub(super) fn not_found(kind: &Kind, name: &str) -> Refusal {
    let message = format!("{} \"{name}\" not found", full(kind));
    status(404, "NotFound", &message, Some(details(kind, name)))
}

pub(super) fn status(code: u16, reason: &str, message: &str, details: Option<Value>) -> Refusal {
    let mut status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
    });
    if !reason.is_empty() {
        status["reason"] = reason.into();
    }
    if let Some(details) = details {
        status["details"] = details;
    }
    status["code"] = code.into();
    status
}

/// Whether labels are as a selector of names and `name=value` asks.
pub(super) fn is_selected(object: &Value, selector: &str) -> bool {
    let labels = &object["metadata"]["labels"];
    selector
        .split(',')
        .filter(|part| !part.is_empty())
        .all(|part| match part.split_once('=') {
            Some((name, value)) => labels[name] == value.trim_start_matches('='),
            None => labels[part].is_string(),
        })
}
