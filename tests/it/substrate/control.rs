//! A control plane of our own: actors with states, few workers, tags, templates that take a while. Each actor is a
//! machine of namespaces whose first process is `wardian sandboxd`; it is suspended by stopping its processes, and a
//! tag is a copy of its files. (Debian's gVisor cannot checkpoint what listens, so processes are not forked here.)

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tonic::Status;
use wardian::actor::substrate::messages as m;

use crate::actor::sandboxd::{Machine, Machines};

pub(super) const ATESPACE: &str = "gym";

pub(super) const RUNNING: i32 = 2;
const SUSPENDING: i32 = 3;
const SUSPENDED: i32 = 4;
const CRASHED: i32 = 7;

/// How it behaves.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) workers: usize,
    pub(super) golden_delay: Duration,
    pub(super) golden_error: String,
    pub(super) has_policies: bool,
    pub(super) has_tags: bool,
    /// Whether actors are deleted in any state; else being suspended takes a while, too.
    pub(super) has_any_state: bool,
    /// Calls whose answer is lost, once each.
    pub(super) loses: Vec<&'static str>,
    pub(super) token: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            workers: 8,
            golden_delay: Duration::ZERO,
            golden_error: String::new(),
            has_policies: true,
            has_tags: true,
            has_any_state: true,
            loses: Vec::new(),
            token: None,
        }
    }
}

#[derive(Debug)]
struct FakeActor {
    message: m::Actor,
    folder: PathBuf,
    machine: Option<Machine>,
    has_policy: bool,
}

impl FakeActor {
    fn state(&self) -> i32 {
        self.message.status.as_ref().unwrap().state
    }

    fn set(&mut self, state: i32, crash: Option<&str>) {
        self.message.status = Some(m::ActorStatus {
            state,
            crash: crash.map(|message| m::Crash {
                message: message.to_owned(),
            }),
        });
    }
}

#[derive(Debug, Default)]
struct State {
    settings: Settings,
    actors: BTreeMap<String, FakeActor>,
    tags: BTreeMap<String, m::Tag>,
    templates: BTreeMap<String, (Instant, m::ActorTemplate)>,
    calls: Vec<String>,
    /// Actors that ran without a policy.
    unguarded: Vec<String>,
    folders: u32,
}

#[derive(Debug)]
pub(super) struct Control {
    base: tempfile::TempDir,
    machines: Machines,
    state: Mutex<State>,
}

type Answer<T> = Result<T, Status>;

impl Control {
    pub(super) fn new(settings: Settings) -> Arc<Self> {
        let base = tempfile::tempdir().unwrap();
        Arc::new(Self {
            machines: Machines::new(base.path()),
            base,
            state: Mutex::new(State {
                settings,
                ..State::default()
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn has_any_state(&self) -> bool {
        self.lock().settings.has_any_state
    }

    pub(super) fn token(&self) -> Option<String> {
        self.lock().settings.token.clone()
    }

    pub(super) fn base(&self) -> &Path {
        self.base.path()
    }

    pub(super) fn set(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.lock().settings);
    }

    pub(super) fn count(&self, call: &str) -> usize {
        self.lock()
            .calls
            .iter()
            .filter(|made| *made == call)
            .count()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.lock().actors.keys().cloned().collect()
    }

    pub(super) fn unguarded(&self) -> Vec<String> {
        self.lock().unguarded.clone()
    }

    pub(super) fn templates(&self) -> Vec<m::ActorTemplate> {
        let state = self.lock();
        state
            .templates
            .values()
            .map(|(_, template)| template.clone())
            .collect()
    }

    /// Everything that is there, by its name.
    pub(super) fn everything(&self) -> Vec<String> {
        let state = self.lock();
        let names = state.actors.keys().chain(state.tags.keys());
        names.chain(state.templates.keys()).cloned().collect()
    }

    /// Ends an actor, for the reason that is given.
    pub(super) fn crash(&self, name: &str, message: &str) {
        let mut state = self.lock();
        let actor = state.actors.get_mut(name).unwrap();
        actor.machine = None;
        actor.set(CRASHED, Some(message));
    }

    /// Returns where an actor that runs is reached.
    pub(super) fn address(&self, name: &str) -> Option<std::net::SocketAddr> {
        let state = self.lock();
        let actor = state
            .actors
            .get(name)
            .filter(|actor| actor.state() == RUNNING)?;
        actor.machine.as_ref().map(|machine| machine.address)
    }

    pub(super) fn has_actor(&self, name: &str) -> bool {
        self.lock().actors.contains_key(name)
    }

    /// Notes a call, and fails those whose answer is lost once they are done.
    fn done<T>(&self, call: &'static str, answer: T) -> Answer<T> {
        let mut state = self.lock();
        state.calls.push(call.to_owned());
        let loses = &mut state.settings.loses;
        match loses.iter().position(|lost| *lost == call) {
            Some(at) => {
                loses.remove(at);
                Err(Status::unavailable("the connection was reset"))
            }
            None => Ok(answer),
        }
    }

    pub(super) fn create_actor(&self, actor: Option<m::Actor>) -> Answer<m::Actor> {
        let mut actor = actor.ok_or_else(|| Status::invalid_argument("no actor"))?;
        let name = name_of(actor.metadata.as_ref())?;
        {
            let mut state = self.lock();
            if state.actors.contains_key(&name) {
                return Err(Status::already_exists(name));
            }
            let template = actor.actor_template.clone().unwrap_or_default().name;
            if !state.templates.contains_key(&template) && template != "ready-made" {
                return Err(Status::not_found(format!("template {template}")));
            }
            state.folders += 1;
            let folder = self.base.path().join(format!("f{}", state.folders));
            match &actor.source_tag {
                Some(tag) if !state.tags.contains_key(&tag.name) => {
                    return Err(Status::not_found(format!("tag {}", tag.name)));
                }
                Some(tag) => copy(&self.base.path().join(&tag.name), &folder),
                None => {
                    for inside in ["tmp", "workspace"] {
                        fs_err::create_dir_all(folder.join(inside)).unwrap();
                    }
                }
            }
            actor.status = Some(m::ActorStatus {
                state: SUSPENDED,
                crash: None,
            });
            let fake = FakeActor {
                message: actor.clone(),
                folder,
                machine: None,
                has_policy: false,
            };
            state.actors.insert(name, fake);
        }
        self.done("CreateActor", actor)
    }

    pub(super) fn get_actor(&self, actor: Option<m::ObjectRef>) -> Answer<m::Actor> {
        let state = self.lock();
        Ok(find(&state.actors, actor)?.1.message.clone())
    }

    pub(super) fn list_actors(&self) -> Vec<m::Actor> {
        let state = self.lock();
        state
            .actors
            .values()
            .map(|actor| actor.message.clone())
            .collect()
    }

    pub(super) fn resume_actor(&self, actor: Option<m::ObjectRef>) -> Answer<m::Actor> {
        let message = {
            let mut state = self.lock();
            let (name, found) = find(&state.actors, actor)?;
            let (name, current) = (name.clone(), found.state());
            if current == CRASHED {
                return Err(Status::failed_precondition("the actor crashed"));
            }
            let busy = state
                .actors
                .values()
                .filter(|actor| actor.state() == RUNNING)
                .count();
            if current != RUNNING && busy >= state.settings.workers {
                return Err(Status::unavailable("no free workers available"));
            }
            let has_policies = state.settings.has_policies;
            let actor = state.actors.get_mut(&name).unwrap();
            match &actor.machine {
                Some(machine) => signal(machine, "CONT"),
                None => actor.machine = Some(self.machines.start_over(&actor.folder)),
            }
            actor.set(RUNNING, None);
            let (message, is_unguarded) =
                (actor.message.clone(), has_policies && !actor.has_policy);
            if is_unguarded {
                state.unguarded.push(name);
            }
            message
        };
        self.done("ResumeActor", message)
    }

    pub(super) fn suspend_actor(&self, actor: Option<m::ObjectRef>) -> Answer<m::Actor> {
        let message = {
            let mut state = self.lock();
            let name = find(&state.actors, actor)?.0.clone();
            let is_slow = !state.settings.has_any_state;
            let actor = state.actors.get_mut(&name).unwrap();
            if actor.state() == CRASHED {
                return Err(Status::failed_precondition("the actor crashed"));
            }
            if actor.state() == SUSPENDING {
                actor.set(SUSPENDED, None);
                return Err(Status::failed_precondition("it is being suspended"));
            }
            if let Some(machine) = &actor.machine {
                signal(machine, "STOP");
            }
            let next = if is_slow { SUSPENDING } else { SUSPENDED };
            actor.set(next, None);
            actor.message.clone()
        };
        self.done("SuspendActor", message)
    }

    pub(super) fn delete_actor(&self, actor: Option<m::ObjectRef>, any: bool) -> Answer<m::Actor> {
        let message = {
            let mut state = self.lock();
            let (name, found) = find(&state.actors, actor)?;
            let any = any && state.settings.has_any_state;
            if !any && ![SUSPENDED, CRASHED].contains(&found.state()) {
                return Err(Status::failed_precondition("it runs"));
            }
            let name = name.clone();
            let mut actor = state.actors.remove(&name).unwrap();
            actor.machine = None;
            remove(&actor.folder);
            actor.message
        };
        self.done("DeleteActor", message)
    }

    pub(super) fn create_policy(&self, actor: Option<m::ObjectRef>) -> Answer<m::EgressPolicy> {
        {
            let mut state = self.lock();
            if !state.settings.has_policies {
                return Err(Status::unimplemented(
                    "unknown method CreateActorEgressPolicy",
                ));
            }
            let name = find(&state.actors, actor)?.0.clone();
            let actor = state.actors.get_mut(&name).unwrap();
            if actor.has_policy {
                return Err(Status::already_exists("default"));
            }
            actor.has_policy = true;
        }
        self.done("CreateActorEgressPolicy", m::EgressPolicy::default())
    }

    pub(super) fn create_tag(&self, tag: Option<m::Tag>) -> Answer<m::Tag> {
        let mut tag = tag.ok_or_else(|| Status::invalid_argument("no tag"))?;
        let name = name_of(tag.metadata.as_ref())?;
        {
            let mut state = self.lock();
            if !state.settings.has_tags {
                return Err(Status::unimplemented("unknown method CreateTag"));
            }
            if state.tags.contains_key(&name) {
                return Err(Status::already_exists(name));
            }
            let actor = find(&state.actors, tag.source_actor.clone())?.1;
            if actor.state() != SUSPENDED {
                return Err(Status::failed_precondition("the actor is not suspended"));
            }
            copy(&actor.folder, &self.base.path().join(&name));
            tag.status = Some(m::TagStatus {
                snapshot: Some(m::ExternalSnapshot {
                    snapshot_uri: format!("file:///{name}"),
                }),
            });
            state.tags.insert(name, tag.clone());
        }
        self.done("CreateTag", tag)
    }

    pub(super) fn get_tag(&self, tag: Option<m::ObjectRef>) -> Answer<m::Tag> {
        let state = self.lock();
        Ok(find(&state.tags, tag)?.1.clone())
    }

    pub(super) fn list_tags(&self) -> Vec<m::Tag> {
        self.lock().tags.values().cloned().collect()
    }

    pub(super) fn delete_tag(&self, tag: Option<m::ObjectRef>) -> Answer<m::Tag> {
        let tag = {
            let mut state = self.lock();
            let name = find(&state.tags, tag)?.0.clone();
            let user = state.actors.iter().find(|(_, actor)| {
                let source = actor.message.source_tag.as_ref();
                source.is_some_and(|tag| tag.name == name)
            });
            if let Some((user, _)) = user {
                // It would lose what it started from.
                panic!("the tag {name} was deleted before {user}, which started from it");
            }
            remove(&self.base.path().join(&name));
            state.tags.remove(&name).unwrap()
        };
        self.done("DeleteTag", tag)
    }

    pub(super) fn create_template(
        &self,
        template: Option<m::ActorTemplate>,
    ) -> Answer<m::ActorTemplate> {
        let template = template.ok_or_else(|| Status::invalid_argument("no template"))?;
        let name = name_of(template.metadata.as_ref())?;
        {
            let mut state = self.lock();
            if state.templates.contains_key(&name) {
                return Err(Status::already_exists(name));
            }
            state
                .templates
                .insert(name, (Instant::now(), template.clone()));
        }
        self.done("CreateActorTemplate", template)
    }

    pub(super) fn get_template(&self, template: Option<m::ObjectRef>) -> Answer<m::ActorTemplate> {
        let state = self.lock();
        let (since, template) = find(&state.templates, template)?.1.clone();
        Ok(golden(&state.settings, since, template))
    }

    pub(super) fn list_templates(&self) -> Vec<m::ActorTemplate> {
        let state = self.lock();
        let templates = state.templates.values().cloned();
        templates
            .map(|(since, template)| golden(&state.settings, since, template))
            .collect()
    }

    pub(super) fn delete_template(
        &self,
        template: Option<m::ObjectRef>,
    ) -> Answer<m::ActorTemplate> {
        let template = {
            let mut state = self.lock();
            let name = find(&state.templates, template)?.0.clone();
            state.templates.remove(&name).unwrap().1
        };
        self.done("DeleteActorTemplate", template)
    }
}

fn golden(settings: &Settings, since: Instant, template: m::ActorTemplate) -> m::ActorTemplate {
    let is_ready = settings.golden_error.is_empty() && since.elapsed() >= settings.golden_delay;
    let golden = m::GoldenSnapshotStatus {
        golden_tag: is_ready.then(|| m::ObjectRef {
            atespace: "ate-golden".to_owned(),
            name: "golden".to_owned(),
        }),
        error_message: settings.golden_error.clone(),
    };
    m::ActorTemplate {
        status: Some(m::ActorTemplateStatus {
            golden_snapshot_status: Some(golden),
        }),
        ..template
    }
}

fn name_of(metadata: Option<&m::Metadata>) -> Answer<String> {
    let metadata = metadata.ok_or_else(|| Status::invalid_argument("no metadata"))?;
    match metadata.atespace == ATESPACE {
        true => Ok(metadata.name.clone()),
        false => Err(Status::failed_precondition("there is no such atespace")),
    }
}

fn find<T>(objects: &BTreeMap<String, T>, wanted: Option<m::ObjectRef>) -> Answer<(&String, &T)> {
    let wanted = wanted.unwrap_or_default();
    if wanted.atespace != ATESPACE {
        return Err(Status::not_found("no such atespace"));
    }
    let found = objects.get_key_value(&wanted.name);
    found.ok_or_else(|| Status::not_found(wanted.name))
}

fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp")
        .arg("-a")
        .args([from, to])
        .status()
        .unwrap();
    assert!(status.success(), "{} could not be copied", from.display());
}

fn remove(folder: &Path) {
    // What a machine that is just ending still writes is in the way.
    let until = Instant::now() + Duration::from_secs(10);
    while fs_err::remove_dir_all(folder).is_err() && folder.exists() {
        assert!(
            Instant::now() < until,
            "{} cannot be removed",
            folder.display()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Stops or continues all processes of a machine.
fn signal(machine: &Machine, signal: &str) {
    for pid in machine.processes() {
        let status = Command::new("kill")
            .args(["-s", signal, &pid.to_string()])
            .status();
        assert!(status.unwrap().success(), "{pid} cannot be signalled");
    }
}
