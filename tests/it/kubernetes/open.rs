//! What is asked and made when a backend is opened, and what an earlier run left.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::json;
use tokio_rustls::TlsAcceptor;
use wardian::actor::ActorBackend as _;
use wardian::actor::kubernetes::{
    ApiServer, Controller as Family, KubernetesBackend, KubernetesOptions, Owner,
};

use super::store::{
    KRUISE_CLAIM, KRUISE_SANDBOX, KRUISE_SET, LEASE, POD, POLICY, SIG_CLAIM, SIG_SANDBOX,
};
use super::{Scene, agent_sandbox, eventually, kruise, spec};

#[test]
fn what_is_not_allowed_is_named_at_once() {
    let scene = Scene::bare();
    *scene.cluster.denied.lock().unwrap() = vec![("create", "pods/exec"), ("patch", "sandboxsets")];
    let error = KubernetesBackend::open(scene.options(Family::kruise())).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(
            "create pods/exec, patch sandboxsets.agents.kruise.io in the namespace `sandboxes`"
        ),
        "{text}"
    );
    assert!(!error.is_guests_doing());
    scene.close();
}

#[test]
fn a_cluster_without_the_controller_is_refused() {
    let scene = Scene::bare();
    *scene.cluster.missing.lock().unwrap() = vec!["extensions.agents.x-k8s.io"];
    let error = KubernetesBackend::open(scene.options(Family::agent_sandbox())).unwrap_err();
    assert!(
        error.to_string().contains("install its controllers"),
        "{error}"
    );
    let mut options = scene.options(Family::kruise());
    options.controller = Family::Kruise {
        group_version: "apps.kruise.io/v1alpha1".to_owned(),
    };
    let error = KubernetesBackend::open(options).unwrap_err();
    assert!(
        error.to_string().contains("`apps.kruise.io/v1alpha1`"),
        "{error}"
    );
    scene.close();
}

#[test]
fn a_server_that_is_not_there_is_an_error_in_time() {
    let mut scene = Scene::bare();
    let mut options = scene.options(Family::kruise());
    options.request_timeout = Duration::from_secs(2);
    scene.server.stop();
    let error = KubernetesBackend::open(options).unwrap_err();
    assert!(error.to_string().contains("onnection refused"), "{error}");
    scene.server.resume();
    scene.close();
}

#[test]
fn every_object_is_the_runs() {
    for scene in [kruise(), agent_sandbox()] {
        let actor = scene.actor();
        let store = scene.cluster.store();
        let leases = store.list(&LEASE);
        assert_eq!(leases.len(), 1);
        let uid = &leases[0]["metadata"]["uid"];
        let mut seen = 0;
        for kind in [KRUISE_SET, KRUISE_CLAIM, SIG_CLAIM, POLICY] {
            for object in store.list(&kind) {
                seen += 1;
                let metadata = &object["metadata"];
                assert_eq!(metadata["ownerReferences"][0]["uid"], *uid, "{object}");
                assert_eq!(metadata["labels"]["wardian-run"], "test-run", "{object}");
            }
        }
        assert!(seen >= 2);
        for sandbox in store.list(&KRUISE_SANDBOX).iter().filter(|sandbox| {
            sandbox["metadata"]["labels"]["agents.kruise.io/claim-name"].is_string()
        }) {
            assert_eq!(sandbox["metadata"]["ownerReferences"][0]["uid"], *uid);
            assert!(sandbox["spec"]["shutdownTime"].is_string());
        }
        for pod in store.list(&POD) {
            assert_eq!(pod["metadata"]["labels"]["wardian-run"], "test-run");
            assert_eq!(pod["spec"]["runtimeClassName"], "gvisor");
            assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
        }
        let policies = store.list(&POLICY);
        assert_eq!(
            policies[0]["spec"]["policyTypes"],
            json!(["Ingress", "Egress"])
        );
        let instance = &policies[0]["spec"]["podSelector"]["matchLabels"]["wardian-instance"];
        assert_eq!(
            *instance,
            store.list(&POD)[0]["metadata"]["labels"]["wardian-instance"]
        );
        drop(store);
        drop(actor);
        scene.close();
    }
}

#[test]
fn the_runs_owner_takes_everything_with_it() {
    let mut scene = Scene::bare();
    let owner = json!({ "metadata": { "name": "trainer" }, "spec": { "containers": [{ "image": "trainer" }] } });
    let owner = scene.cluster.store().create(&POD, owner).unwrap();
    let mut options = scene.options(Family::agent_sandbox());
    options.owner = Some(Owner {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: "trainer".to_owned(),
        uid: owner["metadata"]["uid"].as_str().unwrap().to_owned(),
    });
    scene.backend = Some(KubernetesBackend::open(options).unwrap());
    let actor = scene.actor();
    scene.cluster.store().delete(&POD, "trainer").unwrap();
    eventually("objects outlive the run's pod", || {
        scene.cluster.store().names().is_empty()
    });
    drop(actor);
    scene.close();
}

/// A pod that nobody can delete yet, as on a node that does not answer, keeps what keeps it from the network.
#[test]
fn no_pod_outlives_its_network_policy() {
    let mut scene = kruise();
    let policy = |scene: &Scene| scene.cluster.store().list(&POLICY);
    let instance = policy(&scene)[0]["metadata"]["labels"]["wardian-instance"].clone();
    let labels = json!({
        "app.kubernetes.io/managed-by": "wardian", "wardian-instance": instance,
    });
    let pod = json!({
        "metadata": { "name": "stuck", "labels": labels }, "spec": { "containers": [{ "image": "other" }] },
    });
    scene.cluster.store().create(&POD, pod).unwrap();
    // The run has crashed, and the next ones clean up after it.
    let _crashed = ManuallyDrop::new(scene.backend.take());
    let lease = scene.cluster.store().list(&LEASE).remove(0);
    let name = lease["metadata"]["name"].as_str().unwrap();
    scene.cluster.store().update(&LEASE, name, |lease| {
        lease["spec"]["renewTime"] = "2026-01-01T00:00:00.000000Z".into();
    });
    for _ in 0..2 {
        drop(KubernetesBackend::open(scene.options(Family::agent_sandbox())).unwrap());
        let left = policy(&scene);
        assert_eq!(left.len(), 1);
        assert_eq!(left[0]["metadata"]["labels"]["wardian-instance"], instance);
        assert!(left[0]["metadata"]["ownerReferences"].is_null(), "{left:?}");
        assert!(scene.cluster.store().list(&LEASE).is_empty());
    }
    scene.cluster.store().delete(&POD, "stuck").unwrap();
    drop(KubernetesBackend::open(scene.options(Family::kruise())).unwrap());
    scene.close();
}

#[test]
fn what_a_crashed_run_left_is_deleted_and_what_lives_is_not() {
    for family in [Family::kruise(), Family::agent_sandbox()] {
        let mut scene = Scene::bare();
        let crashed = KubernetesBackend::open(scene.options(family.clone())).unwrap();
        let actor = crashed.create(&spec()).unwrap();
        // It does not end, and renews nothing any more.
        let _kept = (ManuallyDrop::new(actor), ManuallyDrop::new(crashed));
        let (old, before) = {
            let mut store = scene.cluster.store();
            let lease = store.list(&LEASE).remove(0);
            let name = lease["metadata"]["name"].as_str().unwrap().to_owned();
            store.update(&LEASE, &name, |lease| {
                lease["spec"]["renewTime"] = "2026-01-01T00:00:00.000000Z".into();
            });
            (
                lease["metadata"]["labels"]["wardian-instance"].clone(),
                store.names().len(),
            )
        };
        assert!(
            before >= 5,
            "it left a lease, a policy, a pool, a claim and pods"
        );
        let living = KubernetesBackend::open(scene.options(family.clone())).unwrap();
        let of_old = |scene: &Scene| {
            let store = scene.cluster.store();
            let kinds = super::store::KINDS.iter();
            let all: Vec<_> = kinds.flat_map(|kind| store.list(kind)).collect();
            all.iter()
                .filter(|object| object["metadata"]["labels"]["wardian-instance"] == old)
                .count()
        };
        assert_eq!(of_old(&scene), 0);
        // A second backend leaves the first one alone.
        let actor = living.create(&spec()).unwrap();
        scene.backend = Some(KubernetesBackend::open(scene.options(family)).unwrap());
        assert_eq!(crate::actor::text(&*actor, "echo alive"), "alive");
        drop(actor);
        drop(living);
        scene.close();
    }
}

/// Returns a server's side of TLS for 127.0.0.1, and the authority that vouches for it.
fn tls() -> (TlsAcceptor, String) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &root).unwrap();
    let config = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(
            vec![certificate.der().clone()],
            key.serialize_der().try_into().unwrap(),
        )
        .unwrap();
    (TlsAcceptor::from(Arc::new(config)), root.pem())
}

#[test]
fn a_kubeconfig_says_who_is_trusted_and_who_we_are() {
    const TOKEN: &str = "the-token";
    let (acceptor, authority) = tls();
    let mut scene = Scene::with(Some(TOKEN), Some(acceptor));
    let folder = tempfile::tempdir().unwrap();
    let write = |authority: &str, token: &str| {
        let ca = folder.path().join("ca.pem");
        fs_err::write(&ca, authority).unwrap();
        let file = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{ "name": "c", "cluster": {
                "server": scene.server.url(), "certificate-authority": ca,
            } }],
            "users": [{ "name": "u", "user": { "token": token } }],
            "contexts": [
                { "name": "here", "context": { "cluster": "c", "user": "u", "namespace": super::NAMESPACE } },
            ],
        });
        let path = folder.path().join("config");
        fs_err::write(&path, file.to_string()).unwrap();
        KubernetesOptions {
            api_server: ApiServer::Kubeconfig {
                path,
                context: None,
            },
            namespace: None,
            request_timeout: Duration::from_secs(5),
            ..scene.options(Family::kruise())
        }
    };
    let error = KubernetesBackend::open(write(&authority, "another")).unwrap_err();
    assert!(error.to_string().contains("Unauthorized (401"), "{error}");
    let error = KubernetesBackend::open(write(&tls().1, TOKEN)).unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    assert!(!error.to_string().contains(TOKEN));
    scene.backend = Some(KubernetesBackend::open(write(&authority, TOKEN)).unwrap());
    let actor = scene.actor();
    assert_eq!(
        crate::actor::text(&*actor, "echo here"),
        "here",
        "a program's connection is TLS, too"
    );
    drop(actor);
    scene.close();
    let missing = ApiServer::Kubeconfig {
        path: "/no/such/config".into(),
        context: None,
    };
    let scene = Scene::bare();
    let mut options = scene.options(Family::kruise());
    options.api_server = missing;
    let error = KubernetesBackend::open(options).unwrap_err();
    assert!(error.to_string().contains("/no/such/config"), "{error}");
    assert!(error.to_string().contains("set `KUBECONFIG`"), "{error}");
    scene.close();
}

#[test]
fn a_server_that_has_just_started_is_waited_for() {
    let mut scene = Scene::bare();
    // As a real one answers the first requests for a kind.
    for path in ["/sandboxsets?", "/sandboxclaims?", "/leases?"] {
        scene.fault("GET", path, 429, 1);
    }
    scene.backend = Some(KubernetesBackend::open(scene.options(Family::kruise())).unwrap());
    assert_eq!(scene.faults_left(), 0);
    let sandboxes = scene.cluster.store().list(&SIG_SANDBOX).len();
    assert_eq!(sandboxes, 0, "kinds of the same name are others");
    scene.close();
}
