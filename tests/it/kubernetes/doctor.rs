//! `wardian doctor` asks the API server what is allowed.

use super::{NAMESPACE, Scene};
use crate::doctor::Patient;

#[test]
fn rights_that_are_denied_and_kinds_that_are_missing_are_found() {
    let scene = Scene::bare();
    let server = format!("actor.kubernetes.api_server={}", scene.server.url());
    let namespace = format!("actor.kubernetes.namespace={NAMESPACE}");
    let sets = ["actor.backend=kruise", &server, &namespace];
    let arguments: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let examine = || Patient::new().examine(&arguments);
    examine().is_well();
    *scene.cluster.denied.lock().unwrap() = vec![("create", "pods/exec"), ("patch", "sandboxsets")];
    let found = examine();
    let denied =
        "may not create pods/exec, patch sandboxsets.agents.kruise.io in the namespace `sandboxes`";
    found.shows(
        "cluster",
        denied,
        "kubectl -n sandboxes create role wardian-1 --verb=create --resource=pods/exec",
    );
    scene.cluster.denied.lock().unwrap().clear();
    *scene.cluster.missing.lock().unwrap() = vec!["agents.kruise.io"];
    examine().shows(
        "cluster",
        "which the cluster does not have",
        "install its controllers",
    );
    // It only asks: nothing is made.
    assert!(scene.cluster.store().names().is_empty());
    scene.close();
}

#[test]
fn a_server_that_is_gone_is_found() {
    let mut scene = Scene::bare();
    let server = format!("actor.kubernetes.api_server={}", scene.server.url());
    scene.server.stop();
    let arguments = ["--set", "actor.backend=agent-sandbox", "--set", &server];
    Patient::new().examine(&arguments).shows(
        "cluster",
        "onnection refused",
        "kubectl cluster-info",
    );
    scene.server.resume();
    scene.close();
}
