//! The server of these tests answers as a real one did: `tests/golden/kubernetes` holds what was recorded
//! from Kubernetes 1.36.

use std::path::Path;

use kube::api::{
    DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, WatchEvent,
    WatchParams,
};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, Config};
use serde_json::{Value, json};

use super::{NAMESPACE, Scene};

/// Returns the status code and the JSON of a recorded response.
fn recorded(name: &str) -> (u16, Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/kubernetes")
        .join(name);
    let text = fs_err::read_to_string(path).unwrap();
    let code = text.split_whitespace().nth(1).unwrap().parse().unwrap();
    let body = &text[text.find('{').unwrap()..];
    (code, serde_json::from_str(body.trim()).unwrap())
}

/// Returns the names of what is in a value, to compare shapes: of objects their fields, of lists their first.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| (name.clone(), shape(value)))
            .collect(),
        Value::Array(items) => items.iter().take(1).map(shape).collect(),
        Value::String(_) => "text".into(),
        Value::Number(_) => 0.into(),
        other => other.clone(),
    }
}

struct Asked {
    api: Api<DynamicObject>,
    kind: ApiResource,
}

impl Asked {
    fn of(scene: &Scene, kind: &str, plural: &str) -> Self {
        let client = Client::try_from(Config::new(scene.server.url().parse().unwrap())).unwrap();
        let gvk = GroupVersionKind::gvk("agents.kruise.io", "v1alpha1", kind);
        let kind = ApiResource::from_gvk_with_plural(&gvk, plural);
        Self {
            api: Api::namespaced_with(client, NAMESPACE, &kind),
            kind,
        }
    }

    fn object(&self, name: &str, replicas: &Value) -> DynamicObject {
        let container = json!({ "image": "r/x:1", "name": "main" });
        let template = json!({ "spec": { "containers": [container] } });
        DynamicObject::new(name, &self.kind)
            .data(json!({ "spec": { "replicas": replicas, "template": template } }))
    }
}

fn refused<T: std::fmt::Debug>(answer: kube::Result<T>) -> (u16, Value) {
    let kube::Error::Api(status) = answer.unwrap_err() else {
        panic!("the server has not answered");
    };
    let mut value = serde_json::to_value(&*status).unwrap();
    // The client leaves them out.
    value["kind"] = "Status".into();
    value["apiVersion"] = "v1".into();
    (status.code, value)
}

/// Compares all but the names of what was asked for.
fn same(name: &str, (code, found): (u16, Value)) {
    let (expected_code, expected) = recorded(name);
    assert_eq!(code, expected_code, "{name}");
    assert_eq!(found["reason"], expected["reason"], "{name}");
    let mut shapes = [found, expected].map(|value| shape(&value));
    for shape in &mut shapes {
        shape.as_object_mut().unwrap().sort_keys();
    }
    let [found, expected] = shapes;
    for (field, value) in expected.as_object().unwrap() {
        if field == "details" {
            for (field, value) in value.as_object().unwrap() {
                assert_eq!(found["details"][field], *value, "{name}: details.{field}");
            }
        } else {
            assert_eq!(found[field], *value, "{name}: {field}");
        }
    }
}

#[test]
fn errors_are_those_of_a_real_server() {
    let scene = Scene::bare();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let sets = Asked::of(&scene, "SandboxSet", "sandboxsets");
        let post = PostParams::default();
        same(
            "get-sandboxset-404.http",
            refused(sets.api.get("nope").await),
        );
        sets.api
            .create(&post, &sets.object("s1", &0.into()))
            .await
            .unwrap();
        let again = sets.api.create(&post, &sets.object("s1", &0.into())).await;
        same("post-sandboxset-409.http", refused(again));
        let wrong = sets.object("s2", &"two".into());
        same(
            "post-sandboxset-422.http",
            refused(sets.api.create(&post, &wrong).await),
        );
        // The same mistake in a server-side apply is 500, without a reason.
        let apply = PatchParams::apply("harness");
        let (code, status) = refused(sets.api.patch("s2", &apply, &Patch::Apply(&wrong)).await);
        assert_eq!(code, 500);
        let message = status["message"].as_str().unwrap();
        assert!(
            message.contains("failed to create typed patch object"),
            "{message}"
        );
        assert!(message.contains("expected numeric"), "{message}");
        assert!(
            status.get("reason").is_none_or(|reason| reason == ""),
            "{status}"
        );
        // Who applies what another one has applied, without force, is told so.
        let mine = json!({ "apiVersion": sets.kind.api_version, "kind": "SandboxSet",
            "metadata": { "name": "s3" }, "spec": { "replicas": 0, "template": {} } });
        let mut theirs = mine.clone();
        theirs["spec"]["replicas"] = json!(5);
        sets.api
            .patch("s3", &PatchParams::apply("curl"), &Patch::Apply(&mine))
            .await
            .unwrap();
        let conflict = sets.api.patch("s3", &apply, &Patch::Apply(&theirs)).await;
        let (_, said) = recorded("apply-conflict-409.http");
        let (code, status) = refused(conflict);
        assert_eq!(status["message"], said["message"]);
        assert_eq!(status["details"]["causes"], said["details"]["causes"]);
        same("apply-conflict-409.http", (code, status));
        theirs["spec"]["replicas"] = json!(0);
        sets.api
            .patch("s3", &apply.clone().force(), &Patch::Apply(&theirs))
            .await
            .unwrap();
        // Pages of a list.
        let page = sets
            .api
            .list(&ListParams::default().limit(1))
            .await
            .unwrap();
        let (_, said) = recorded("list-sandboxsets.http");
        assert_eq!(page.items.len(), 1);
        assert!(page.metadata.continue_.is_some() && said["metadata"]["continue"].is_string());
        assert!(
            page.metadata.remaining_item_count.is_some()
                && said["metadata"]["remainingItemCount"].is_number()
        );
        let next = ListParams::default().continue_token(&page.metadata.continue_.unwrap());
        let rest = sets.api.list(&next).await.unwrap();
        assert_eq!(rest.items.len(), 1);
        // A deletion says what was deleted.
        let claims = Asked::of(&scene, "SandboxClaim", "sandboxclaims");
        let claim = DynamicObject::new("claim-f8xww", &claims.kind)
            .data(json!({ "spec": { "templateName": "none" } }));
        claims.api.create(&post, &claim).await.unwrap();
        let deleted = claims
            .api
            .delete("claim-f8xww", &DeleteParams::default())
            .await
            .unwrap()
            .right()
            .unwrap();
        let (_, said) = recorded("delete-claim.http");
        let deleted = serde_json::to_value(&deleted).unwrap();
        assert_eq!(deleted["status"], said["status"]);
        for field in ["name", "group", "kind"] {
            assert_eq!(deleted["details"][field], said["details"][field]);
        }
        for name in ["s1", "s3"] {
            sets.api
                .delete(name, &DeleteParams::default())
                .await
                .unwrap();
        }
    });
    drop(runtime);
    scene.close();
}

#[test]
fn what_pod_security_refuses_is_said_in_its_words() {
    let (_, said) = recorded("pods-403-psa.http");
    let pod = json!({ "containers": [{ "name": "a", "image": "r/x:1" }] });
    let problems = super::controller::violations(&pod).join(", ");
    let message = said["message"].as_str().unwrap();
    assert!(
        message.ends_with(&format!(
            "violates PodSecurity \"restricted:latest\": {problems}"
        )),
        "{problems}"
    );
}

#[test]
fn programs_and_rights_are_answered_as_by_a_real_server() {
    let scene = Scene::bare();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let client = Client::try_from(Config::new(scene.server.url().parse().unwrap())).unwrap();
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods");
        let request = kube::api::Request::new(path);
        let request = request.exec("none", ["true"], &kube::api::AttachParams::default()).unwrap();
        let Err(refusal) = client.connect(request).await else {
            panic!("there is no such pod");
        };
        same("exec-404.http", refused::<()>(Err(refusal)));
        let gvk = GroupVersionKind::gvk("authorization.k8s.io", "v1", "SelfSubjectAccessReview");
        let kind = ApiResource::from_gvk_with_plural(&gvk, "selfsubjectaccessreviews");
        let (_, said) = recorded("selfsubjectaccessreview.http");
        let asked = json!({ "apiVersion": kind.api_version, "kind": kind.kind, "metadata": {}, "spec": said["spec"] });
        let api: Api<DynamicObject> = Api::all_with(client, &kind);
        let asked = serde_json::from_value(asked).unwrap();
        let answer = api.create(&PostParams::default(), &asked).await.unwrap();
        assert_eq!(answer.data["spec"], said["spec"]);
        assert_eq!(answer.data["status"], said["status"]);
    });
    drop(runtime);
    scene.close();
}

#[test]
fn a_watch_from_too_long_ago_is_told_so_in_its_events() {
    use futures_util::StreamExt as _;
    let scene = Scene::bare();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let sets = Asked::of(&scene, "SandboxSet", "sandboxsets");
        let mut events = Box::pin(sets.api.watch(&WatchParams::default(), "1").await.unwrap());
        let event = events.next().await.unwrap();
        let (_, said) = recorded("watch-410.http");
        let status = match event {
            Ok(WatchEvent::Error(status)) => status,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            u64::from(status.code),
            said["object"]["code"].as_u64().unwrap()
        );
        assert_eq!(status.reason, said["object"]["reason"].as_str().unwrap());
        assert!(status.message.starts_with("too old resource version: 1 ("));
        assert!(events.next().await.is_none(), "it ends with that");
    });
    drop(runtime);
    scene.close();
}
