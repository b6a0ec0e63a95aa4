//! What goes wrong in clusters: each ends as an error of ours or as the guest's ending, and leaves nothing.

use std::time::{Duration, Instant};

use axum::http::Method;
use serde_json::json;
use wardian::actor::kubernetes::{Controller as Family, KubernetesBackend};
use wardian::actor::{ActorBackend as _, ActorCommand, ActorError, ActorSpec, Ending, RootFs};

use super::controller::Claims;
use super::server::Fault;
use super::store::{KRUISE_CLAIM, KRUISE_SANDBOX, POD, SIG_CLAIM};
use super::{Scene, agent_sandbox, eventually, kruise, spec};
use crate::actor::text;

impl Scene {
    /// Has the server answer requests by itself.
    pub(super) fn fault(&self, method: &str, path: &'static str, code: u16, times: u32) {
        self.cluster.faults.lock().unwrap().push(Fault {
            method: Method::from_bytes(method.as_bytes()).unwrap(),
            path,
            code,
            times,
        });
    }

    /// Returns how many of these answers were not given yet.
    pub(super) fn faults_left(&self) -> u32 {
        self.cluster
            .faults
            .lock()
            .unwrap()
            .iter()
            .map(|fault| fault.times)
            .sum()
    }

    /// Waits until a claim is there.
    fn wait_for_claim(&self) {
        eventually("no claim was made", || {
            let store = self.cluster.store();
            store.list(&KRUISE_CLAIM).len() + store.list(&SIG_CLAIM).len() > 0
        });
    }

    /// Waits until a program was started.
    fn wait_for_exec(&self, before: usize) {
        eventually("no program was started", || self.execs() > before);
    }

    fn execs(&self) -> usize {
        self.asked("/exec?")
    }

    /// Returns how many requests hold a text.
    fn asked(&self, text: &str) -> usize {
        let requests = self.cluster.requests.lock().unwrap();
        requests
            .iter()
            .filter(|request| request.contains(text))
            .count()
    }
}

/// A command that ends when it is ended.
fn endless() -> ActorCommand {
    ActorCommand {
        timeout: Duration::from_secs(60),
        ..ActorCommand::shell("echo begun; sleep 1000")
    }
}

#[test]
fn a_claim_survives_what_passes() {
    for scene in [kruise(), agent_sandbox()] {
        scene.controller().set_claims(Claims::Ignored);
        // Writes, lists and watches are refused for some time.
        scene.fault("PATCH", "/sandboxclaims/", 429, 1);
        scene.fault("PATCH", "/sandboxclaims/", 500, 2);
        scene.fault("GET", "/sandboxclaims?&labelSelector=wardian-claim", 500, 1);
        scene.fault("GET", "/sandboxclaims?&watch", 429, 1);
        scene.fault("GET", "/sandboxclaims?&watch", 410, 2);
        let actor = std::thread::scope(|scope| {
            let created = scope.spawn(|| scene.actor());
            scene.wait_for_claim();
            // Three watches are refused; the next ones are cut, and what they have seen is forgotten.
            for number in 4..7 {
                eventually("no watch was begun", || {
                    scene.asked("/sandboxclaims?&watch") >= number
                });
                scene.cluster.store().forget_events();
                scene.cluster.cuts.send_modify(|cuts| *cuts += 1);
            }
            scene.controller().set_claims(Claims::Served);
            created.join().unwrap()
        });
        assert_eq!(scene.faults_left(), 0);
        assert_eq!(text(&*actor, "echo here"), "here");
        drop(actor);
        scene.close();
    }
}

#[test]
fn a_claim_survives_a_restart_of_the_server() {
    for mut scene in [kruise(), agent_sandbox()] {
        scene.controller().set_claims(Claims::Ignored);
        let backend = scene.backend.take().unwrap();
        let actor = std::thread::scope(|scope| {
            let created = scope.spawn(|| backend.create(&spec()));
            scene.wait_for_claim();
            scene.server.stop();
            scene.controller().set_claims(Claims::Served);
            std::thread::sleep(Duration::from_secs(1));
            scene.server.resume();
            created.join().unwrap().unwrap()
        });
        assert_eq!(text(&*actor, "echo here"), "here");
        drop(actor);
        scene.backend = Some(backend);
        scene.close();
    }
}

#[test]
fn a_claim_that_is_never_bound_is_an_error_in_time() {
    for family in [Family::kruise(), Family::agent_sandbox()] {
        let mut scene = Scene::bare();
        let mut options = scene.options(family);
        options.ready_timeout = Duration::from_secs(1);
        scene.backend = Some(KubernetesBackend::open(options).unwrap());
        scene.controller().set_claims(Claims::Ignored);
        let started = Instant::now();
        let error = scene.backend().create(&spec()).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(30));
        assert!(error.to_string().contains("not ready after"), "{error}");
        assert!(
            error.to_string().contains("not seen by the controller"),
            "{error}"
        );
        assert!(!error.is_guests_doing());
        eventually("the claim is left", || {
            let store = scene.cluster.store();
            store.list(&KRUISE_CLAIM).len() + store.list(&SIG_CLAIM).len() == 0
        });
        scene.close();
    }
}

#[test]
fn a_claim_that_is_completed_without_a_sandbox_is_an_error() {
    let scene = kruise();
    scene.controller().set_claims(Claims::Emptied);
    let error = scene.backend().create(&spec()).unwrap_err();
    assert!(
        error.to_string().contains("completed without a sandbox"),
        "{error}"
    );
    assert!(
        error.to_string().contains("no sandbox was available"),
        "{error}"
    );
    assert!(!error.is_guests_doing());
    // The next one is served.
    scene.controller().set_claims(Claims::Served);
    drop(scene.actor());
    eventually("sandboxes of the claims are left", || {
        let store = scene.cluster.store();
        let sandboxes = store.list(&KRUISE_SANDBOX);
        store.list(&KRUISE_CLAIM).is_empty() && sandboxes.len() <= 1
    });
    scene.close();

    let mut scene = Scene::bare();
    let mut options = scene.options(Family::agent_sandbox());
    options.ready_timeout = Duration::from_secs(1);
    scene.backend = Some(KubernetesBackend::open(options).unwrap());
    scene.controller().set_claims(Claims::Emptied);
    let error = scene.backend().create(&spec()).unwrap_err();
    assert!(
        error.to_string().contains("ready without a sandbox"),
        "{error}"
    );
    scene.close();
}

/// An image that cannot be pulled is not waited for until all time is over.
#[test]
fn an_image_that_cannot_be_pulled_is_an_error_soon() {
    const MISSING: &str = "registry.example.org/missing:1";
    let scene = kruise();
    let spec = ActorSpec {
        root: RootFs::Image(MISSING.to_owned()),
        ..spec()
    };
    let error = std::thread::scope(|scope| {
        let created = scope.spawn(|| scene.backend().create(&spec).unwrap_err());
        let mut pods = Vec::new();
        eventually("no pod was made", || {
            pods = scene.cluster.store().list(&POD);
            pods.retain(|pod| pod["spec"]["containers"][0]["image"] == MISSING);
            !pods.is_empty()
        });
        let waiting = json!({ "reason": "ImagePullBackOff", "message": "back-off pulling image" });
        let name = pods[0]["metadata"]["name"].as_str().unwrap();
        scene.cluster.store().update(&POD, name, |pod| {
            pod["status"] = json!({ "phase": "Pending", "containerStatuses": [
                { "name": "main", "state": { "waiting": waiting } },
            ] });
        });
        created.join().unwrap()
    });
    let text = error.to_string();
    assert!(
        text.contains("ImagePullBackOff: back-off pulling image") && text.contains(MISSING),
        "{text}"
    );
    assert!(!error.is_guests_doing());
    scene.close();
}

#[test]
fn a_sandbox_that_is_taken_away_is_our_failure() {
    for scene in [kruise(), agent_sandbox()] {
        let is_kruise = scene.backend().name() == "kruise";
        let evicted = json!({
            "phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory.",
        });
        for (what, reason) in [
            ("evicted", "The node was low"),
            ("deleted", "its pod was deleted"),
        ] {
            let actor = scene.actor();
            let pod = actor.id().to_owned();
            let before = scene.execs();
            let error = std::thread::scope(|scope| {
                let run = scope.spawn(|| actor.exec(&endless()));
                scene.wait_for_exec(before);
                match what {
                    "evicted" => {
                        scene
                            .cluster
                            .store()
                            .update(&POD, &pod, |pod| pod["status"] = evicted.clone());
                        scene.cluster.kubelet.kill(&pod);
                    }
                    _ if is_kruise => {
                        scene.cluster.store().delete(&KRUISE_SANDBOX, &pod).unwrap();
                    }
                    _ => {
                        scene.cluster.store().delete(&POD, &pod).unwrap();
                    }
                }
                run.join().unwrap().unwrap_err()
            });
            assert!(matches!(error, ActorError::Lost { .. }), "{what}: {error}");
            assert!(error.to_string().contains(reason), "{what}: {error}");
            assert!(!error.is_guests_doing());
            let again = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
            assert!(
                matches!(again, ActorError::Lost { .. }),
                "it stays so: {again}"
            );
        }
        scene.close();
    }
}

#[test]
fn a_guest_that_takes_all_memory_has_ended_itself() {
    let scene = kruise();
    let actor = scene.actor();
    let command = ActorCommand {
        timeout: Duration::from_secs(60),
        ..ActorCommand::new(["python3", "-c", "x = b'x' * (1 << 30)"])
    };
    let output = actor.exec(&command).unwrap();
    let limit = actor.spec().limits.memory;
    assert_eq!(output.ending, Ending::OutOfMemory { limit, used: limit });
    let again = actor.exec(&ActorCommand::new(["true"])).unwrap();
    assert_eq!(again.ending, output.ending);
    let error = actor
        .put("/workspace".as_ref(), &wardian::actor::FileTree::new())
        .unwrap_err();
    assert!(error.is_guests_doing(), "{error}");
    drop(actor);
    scene.close();
}

#[test]
fn a_program_whose_connection_is_cut_is_lost_and_its_sandbox_deleted() {
    let mut scene = kruise();
    let backend = scene.backend.take().unwrap();
    let actor = backend.create(&spec()).unwrap();
    let before = scene.execs();
    let error = std::thread::scope(|scope| {
        let run = scope.spawn(|| actor.exec(&endless()));
        scene.wait_for_exec(before);
        scene.server.stop();
        scene.server.resume();
        run.join().unwrap().unwrap_err()
    });
    assert!(
        error
            .to_string()
            .contains("connection to a program was lost"),
        "{error}"
    );
    assert!(!error.is_guests_doing());
    let pod = actor.id().to_owned();
    eventually("the program runs on", || {
        !scene.cluster.kubelet.sandboxes().contains(&pod)
    });
    drop(actor);
    scene.backend = Some(backend);
    scene.close();
}

#[test]
fn what_cannot_be_killed_is_deleted_with_its_sandbox() {
    let scene = agent_sandbox();
    let actor = scene.actor();
    let pod = actor.id().to_owned();
    // The program is started; what would kill it is not.
    scene.fault("GET", "kill+-9+-1", 403, 1);
    let limit = Duration::from_secs(1);
    let command = ActorCommand {
        timeout: limit,
        ..endless()
    };
    // Whether it ended is not known, and that is not the guest's doing.
    let error = actor.exec(&command).unwrap_err();
    assert_eq!(scene.faults_left(), 0);
    assert!(matches!(error, ActorError::Lost { .. }), "{error}");
    assert!(
        error.to_string().contains("could not be told to end"),
        "{error}"
    );
    eventually("its sandbox is left", || {
        !scene.cluster.kubelet.sandboxes().contains(&pod)
    });
    let again = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(matches!(again, ActorError::Lost { .. }), "{again}");
    drop(actor);
    scene.close();
}

#[test]
fn a_refused_start_is_tried_again_and_one_that_may_have_happened_is_not() {
    let scene = kruise();
    let actor = scene.actor();
    scene.fault("GET", "/exec?", 429, 1);
    scene.fault("GET", "/exec?", 500, 1);
    assert_eq!(text(&*actor, "echo once >> log; cat log"), "once");
    assert_eq!(scene.faults_left(), 0);
    // What a proxy on the way says may have come after the program was started.
    scene.fault("GET", "/exec?", 504, 1);
    let before = scene.execs();
    let error = actor
        .exec(&ActorCommand::shell("echo twice >> log"))
        .unwrap_err();
    assert!(matches!(error, ActorError::Lost { .. }), "{error}");
    assert_eq!(scene.execs(), before + 1);
    drop(actor);
    scene.close();
}

#[test]
fn the_actors_lifetime_is_its_end() {
    let scene = kruise();
    let mut spec = spec();
    spec.limits.lifetime = Duration::from_secs(4);
    let actor = scene.backend().create(&spec).unwrap();
    let output = actor.exec(&endless()).unwrap();
    assert!(matches!(output.ending, Ending::TimedOut { limit } if limit <= spec.limits.lifetime));
    let pod = actor.id().to_owned();
    let again = actor.exec(&ActorCommand::new(["true"])).unwrap();
    assert_eq!(
        again.ending,
        Ending::TimedOut {
            limit: spec.limits.lifetime
        }
    );
    eventually("its sandbox is left", || {
        !scene.cluster.kubelet.sandboxes().contains(&pod)
    });
    drop(actor);
    scene.close();
}

/// A run that is to end waits neither for a program nor for a sandbox.
#[test]
fn what_is_waited_for_ends_with_the_run() {
    for scene in [kruise(), agent_sandbox()] {
        let actor = scene.actor();
        let before = scene.execs();
        let error = std::thread::scope(|scope| {
            let run = scope.spawn(|| actor.exec(&endless()));
            scene.wait_for_exec(before);
            scene.backend().shut_down();
            run.join().unwrap().unwrap_err()
        });
        assert!(error.to_string().contains("the run ends"), "{error}");
        assert!(!error.is_guests_doing());
        let error = scene.backend().create(&spec()).unwrap_err();
        assert!(error.to_string().contains("the run ends"), "{error}");
        drop(actor);
        scene.close();
    }
}

/// Controllers make another pod of the same name where one is gone; it has nothing of what was done in the first.
#[test]
fn a_pod_that_was_replaced_is_no_longer_the_actor() {
    let scene = agent_sandbox();
    let actor = scene.actor();
    assert_eq!(text(&*actor, "echo here"), "here");
    let other = "00000000-0000-4000-8000-000000000000";
    (scene.cluster.store()).update(&POD, actor.id(), |pod| {
        pod["metadata"]["uid"] = other.into();
    });
    let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(error.to_string().contains("replaced"), "{error}");
    assert!(!error.is_guests_doing());
    drop(actor);
    scene.close();
}
