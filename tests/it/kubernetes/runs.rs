//! `wardian train` with its actors in a cluster.

use super::kubelet::IMAGE;
use super::{NAMESPACE, Scene};
use crate::heavy::solve_by_script;

fn trains_in(backend: &str) {
    let scene = Scene::bare();
    let folder = tempfile::tempdir().unwrap();
    solve_by_script(folder.path(), 1, |repositories| {
        let repository = repositories.join("a__b-0/testbed");
        let mut content = scene.cluster.kubelet.content.lock().unwrap();
        content.push((repository, "/base".into()));
        let url = scene.server.url();
        format!(
            "backend = '{backend}'\nimage = '{IMAGE}'\n\
             kubernetes = {{ api_server = '{url}', namespace = '{NAMESPACE}', ready_timeout = '5m' }}"
        )
    });
    let posts = scene.cluster.requests.lock().unwrap();
    let execs = posts.iter().filter(|request| request.contains("/exec"));
    assert!(execs.count() > 8, "the tasks ran elsewhere");
    drop(posts);
    scene.close();
}

#[test]
fn a_run_solves_its_tasks_in_sandboxes_of_openkruise() {
    trains_in("kruise");
}

#[test]
fn a_run_solves_its_tasks_in_sandboxes_of_sig_agent_sandbox() {
    trains_in("agent-sandbox");
}
