//! The heavy tier in a cluster: an API server of our own with the quirks of a real one, whose sandboxes are
//! real ones of gVisor. The same suite runs against a real cluster where `WARDIAN_TEST_CLUSTER` names a
//! controller (`kruise` or `agent-sandbox`) and `KUBECONFIG` is set.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod conformance;
mod controller;
mod doctor;
mod exec;
mod faults;
mod images;
mod kubelet;
mod open;
mod parity;
mod runs;
mod sandboxes;
mod server;
mod store;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use wardian::actor::kubernetes::{
    ApiServer, Controller as Family, KubernetesBackend, KubernetesOptions,
};
use wardian::actor::{Actor, ActorBackend as _, ActorSpec, RootFs};

use self::controller::Controller;
use self::kubelet::{IMAGE, Kubelet};
use self::server::{Cluster, Server};
use self::store::Store;
use crate::actor::processes_naming;

/// The namespace of all objects.
const NAMESPACE: &str = "sandboxes";

/// A cluster and a backend over it.
struct Scene {
    backend: Option<KubernetesBackend>,
    server: Server,
    controller: Option<Controller>,
    cluster: Arc<Cluster>,
}

impl Scene {
    /// Starts a cluster alone.
    fn bare() -> Self {
        Self::with(None, None)
    }

    /// Starts a cluster alone, with what clients must show and how they connect.
    fn with(token: Option<&'static str>, acceptor: Option<TlsAcceptor>) -> Self {
        let cluster = Arc::new(Cluster {
            store: Mutex::new(Store::new()),
            faults: Mutex::default(),
            denied: Mutex::default(),
            missing: Mutex::default(),
            requests: Mutex::default(),
            cuts: watch::channel(0).0,
            images: Mutex::default(),
            logs: Mutex::default(),
            token,
            kubelet: Kubelet::new(),
        });
        Self {
            backend: None,
            server: Server::start(Arc::clone(&cluster), acceptor),
            controller: Some(Controller::start(Arc::clone(&cluster))),
            cluster,
        }
    }

    fn of(family: Family) -> Self {
        let mut scene = Self::bare();
        let options = scene.options(family);
        scene.backend = Some(KubernetesBackend::open(options).unwrap());
        scene
    }

    fn options(&self, family: Family) -> KubernetesOptions {
        KubernetesOptions {
            api_server: ApiServer::Url(self.server.url()),
            namespace: Some(NAMESPACE.to_owned()),
            request_timeout: Duration::from_secs(20),
            ready_timeout: Duration::from_secs(90),
            ..KubernetesOptions::new(family, "test-run")
        }
    }

    fn backend(&self) -> &KubernetesBackend {
        self.backend.as_ref().unwrap()
    }

    fn actor(&self) -> Box<dyn Actor> {
        self.backend().create(&spec()).unwrap()
    }

    fn controller(&self) -> &Controller {
        self.controller.as_ref().unwrap()
    }

    /// Drops the backend and checks that nothing of it is left: no object, no sandbox, no process.
    fn close(mut self) {
        drop(self.backend.take());
        let names = self.cluster.store().names();
        assert!(names.is_empty(), "left behind: {names:?}");
        eventually("sandboxes are left behind", || {
            self.cluster.kubelet.sandboxes().is_empty()
        });
        self.server.stop();
        drop(self.controller.take());
        let base = self
            .cluster
            .kubelet
            .base
            .path()
            .to_string_lossy()
            .into_owned();
        let weak = Arc::downgrade(&self.cluster);
        drop(self);
        eventually("threads are left behind", || weak.strong_count() == 0);
        eventually("processes are left behind", || {
            processes_naming(&base).is_empty()
        });
    }
}

fn kruise() -> Scene {
    Scene::of(Family::kruise())
}

fn agent_sandbox() -> Scene {
    Scene::of(Family::agent_sandbox())
}

fn spec() -> ActorSpec {
    ActorSpec {
        root: RootFs::Image(IMAGE.to_owned()),
        ..crate::actor::spec()
    }
}

/// Waits for what comes about by itself.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
