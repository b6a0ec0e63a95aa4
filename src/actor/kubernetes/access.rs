//! Whether the cluster has what the backend needs, asked before anything is made.

use kube::Api;
use kube::api::PostParams;
use kube::core::ApiResource;
use kube::core::DynamicObject;
use serde_json::{Value, json};

use super::cluster::{Link, resource};
use super::retry::{failed, is_missing, patiently};
use super::run::{leases, network_policies, pods};
use crate::actor::ActorError;

/// Verbs for a resource, or for what is below it.
#[derive(Debug, Clone)]
pub(super) struct Right {
    pub(super) kind: ApiResource,
    pub(super) subresource: Option<&'static str>,
    pub(super) verbs: &'static [&'static str],
}

impl Right {
    pub(super) fn new(kind: ApiResource, verbs: &'static [&'static str]) -> Self {
        Self {
            kind,
            subresource: None,
            verbs,
        }
    }

    fn resource(&self) -> String {
        match self.subresource {
            Some(below) => format!("{}/{below}", self.kind.plural),
            None => self.kind.plural.clone(),
        }
    }
}

/// Returns the rights that every backend needs besides those over its own kinds.
pub(super) fn common() -> Vec<Right> {
    vec![
        Right::new(pods(), &["get", "list"]),
        Right {
            kind: pods(),
            subresource: Some("exec"),
            // A WebSocket is a GET that creates: servers ask for both.
            verbs: &["get", "create"],
        },
        Right::new(leases(), &["create", "delete", "get", "list", "patch"]),
        Right::new(
            network_policies(),
            &["create", "delete", "get", "list", "patch"],
        ),
    ]
}

/// Checks that the server knows all kinds and that we may do with them what we must.
///
/// # Errors
///
/// Fails with what is missing, all of it.
pub(super) async fn check(
    link: &Link,
    backend: &'static str,
    rights: &[Right],
) -> Result<(), ActorError> {
    let unusable = |reason: String| Err(ActorError::Unusable { backend, reason });
    let review = review(link, rights).await?;
    if let Some(kind) = review.missing.first() {
        return unusable(format!(
            "needs {kind}, which the cluster does not have; install its controllers, or name the group and \
             version that it has"
        ));
    }
    match review.denied.is_empty() {
        true => Ok(()),
        false => unusable(format!(
            "may not {} in the namespace `{}`; add a Role that allows it",
            review.denied.join(", "),
            link.namespace
        )),
    }
}

/// What a cluster has and allows of what a backend needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessReview {
    /// The namespace that was asked about.
    pub namespace: String,
    /// Kinds that the cluster does not have, each with its group and version.
    pub missing: Vec<String>,
    /// Verbs with resources that are not allowed, such as `create pods/exec`.
    pub denied: Vec<String>,
    /// How many are.
    pub allowed: usize,
}

/// Asks for all kinds, and for all rights to those that there are.
///
/// # Errors
///
/// Fails where the server does not answer.
pub(super) async fn review(link: &Link, rights: &[Right]) -> Result<AccessReview, ActorError> {
    let mut review = AccessReview {
        namespace: link.namespace.clone(),
        missing: Vec::new(),
        denied: Vec::new(),
        allowed: 0,
    };
    for right in rights {
        if !is_known(link, &right.kind).await? {
            let (kind, version) = (&right.kind.kind, &right.kind.api_version);
            review.missing.push(format!("`{kind}` of `{version}`"));
            continue;
        }
        for verb in right.verbs {
            if is_allowed(link, right, verb).await? {
                review.allowed += 1;
                continue;
            }
            let group = match right.kind.group.as_str() {
                "" => String::new(),
                group => format!(".{group}"),
            };
            review
                .denied
                .push(format!("{verb} {}{group}", right.resource()));
        }
    }
    Ok(review)
}

async fn is_known(link: &Link, kind: &ApiResource) -> Result<bool, ActorError> {
    let activity = format!("asking for `{}`", kind.api_version);
    let found = patiently(&activity, link.limit, || async {
        let listed = match kind.group.is_empty() {
            true => link.client.list_core_api_resources(&kind.version).await,
            false => {
                link.client
                    .list_api_group_resources(&kind.api_version)
                    .await
            }
        };
        match listed {
            Ok(list) => Ok(Some(list)),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(error),
        }
    })
    .await?;
    Ok(found.is_some_and(|list| {
        let mut resources = list.resources.iter();
        resources.any(|found| found.name == kind.plural && found.kind == kind.kind)
    }))
}

async fn is_allowed(link: &Link, right: &Right, verb: &str) -> Result<bool, ActorError> {
    let kind = resource(
        "authorization.k8s.io/v1",
        "SelfSubjectAccessReview",
        "selfsubjectaccessreviews",
    );
    let api: Api<DynamicObject> = Api::all_with(link.client.clone(), &kind);
    let mut attributes = json!({
        "namespace": link.namespace, "verb": verb, "group": right.kind.group,
        "resource": right.kind.plural,
    });
    if let Some(below) = right.subresource {
        attributes["subresource"] = below.into();
    }
    let review: Value = json!({
        "apiVersion": kind.api_version, "kind": kind.kind, "metadata": {},
        "spec": { "resourceAttributes": attributes },
    });
    let activity = "asking what is allowed";
    let review: DynamicObject = serde_json::from_value(review)
        .map_err(|error| failed(activity, &kube::Error::SerdeError(error)))?;
    let params = PostParams::default();
    let answer = patiently(activity, link.limit, || api.create(&params, &review)).await?;
    Ok(answer.data.pointer("/status/allowed") == Some(&Value::Bool(true)))
}
