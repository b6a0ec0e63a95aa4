//! Sessions, their limits, and the contracts of OpenEnv and verl.

use futures_util::StreamExt as _;

use super::*;
use crate::trajectory::Trajectory;

async fn post(app: &Router, path: &str, body: &Value) -> Answer {
    ask(app, path, body).await
}

fn hi() -> Value {
    chat(&[user("hi")], &json!({}))
}

#[tokio::test]
async fn a_call_needs_a_session_and_each_api_says_so_in_its_words() {
    let app = router(backend(), ProxyConfig::default());
    for (path, kind) in [
        (CHAT, "/error/type"),
        ("/v1/responses", "/error/type"),
        ("/v1/messages", "/error/type"),
        ("/nobody/v1/messages", "/error/type"),
    ] {
        let answer = post(&app, path, &hi()).await;
        assert_eq!(answer.status, 401);
        assert_eq!(answer.json().pointer(kind).unwrap(), "authentication_error");
    }
    let made = post(&app, "/sessions", &json!({})).await.ok();
    let id = made["session_id"].as_str().unwrap();
    let path = made["base_path"].as_str().unwrap();
    post(&app, &format!("{path}/chat/completions"), &hi())
        .await
        .ok();
    post(&app, &format!("/v1/chat/completions/{id}"), &hi())
        .await
        .ok();
    for (name, value) in [
        ("authorization", format!("Bearer {id}")),
        ("x-api-key", id.to_owned()),
        ("x-wardian-session", id.to_owned()),
    ] {
        let request = HttpRequest::post(CHAT).header(name, value);
        let answer = send(&app, request.body(Body::from(hi().to_string())).unwrap()).await;
        answer.ok();
    }
    assert_eq!(document(&app, id).await["stats"]["n_turns"], 5);
    let models = fetch(&app, &format!("/{id}/v1/models")).await.ok();
    assert_eq!(models["data"][0]["id"], "toy");
    let model = fetch(&app, "/v1/models/gpt-9").await.ok();
    assert_eq!(model["id"], "gpt-9");
}

#[tokio::test]
async fn ids_are_checked_and_sessions_are_few() {
    let config = ProxyConfig {
        max_sessions: 2,
        ..ProxyConfig::default()
    };
    let app = router(backend(), config);
    for id in ["", "../x", "a/b", "v1", ".x", &"x".repeat(129)] {
        let answer = post(&app, "/sessions", &json!({"session_id": id})).await;
        assert_eq!(answer.status, 400, "{id}: {}", answer.text);
    }
    post(&app, "/sessions/a", &json!({})).await.ok();
    assert_eq!(post(&app, "/sessions/a", &json!({})).await.status, 409);
    post(&app, "/sessions/b", &json!({})).await.ok();
    let full = post(&app, "/sessions/c", &json!({})).await;
    assert_eq!(full.status, 503);
    assert_eq!(full.headers[header::RETRY_AFTER], "1");
    let gone = HttpRequest::delete("/sessions/a")
        .body(Body::empty())
        .unwrap();
    assert_eq!(send(&app, gone).await.ok()["deleted"], true);
    post(&app, "/sessions/c", &json!({})).await.ok();
}

#[tokio::test]
async fn control_asks_for_the_admins_key_and_agents_do_not_have_it() {
    let config = ProxyConfig {
        admin_key: Some(ApiKey::new("boss")),
        ..ProxyConfig::default()
    };
    let app = router(backend(), config);
    let as_admin = |request: axum::http::request::Builder, body: Value| {
        let request = request.header(header::AUTHORIZATION, "Bearer boss");
        request.body(Body::from(body.to_string())).unwrap()
    };
    let make = as_admin(HttpRequest::post("/sessions/s"), json!({}));
    send(&app, make).await.ok();
    post(&app, "/s/v1/chat/completions", &hi()).await.ok();
    for path in [
        "/sessions",
        "/sessions/s",
        "/sessions/s/rollout",
        "/sessions/s/trace_entries",
        "/sessions/s/trajectories",
    ] {
        // The session's own key is not enough.
        let request = HttpRequest::get(path).header(header::AUTHORIZATION, "Bearer s");
        let answer = send(&app, request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status, 401, "{path}");
        let answer = send(&app, as_admin(HttpRequest::get(path), json!({}))).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text);
    }
    let unasked = post(&app, "/sessions/t", &json!({})).await;
    assert_eq!(unasked.status, 401);
}

#[tokio::test]
async fn a_reset_fences_the_attempt_before_it() {
    let app = toy();
    post(&app, "/s/v1/chat/completions", &hi()).await.ok();
    let reset = post(&app, "/sessions/s/reset", &json!({})).await.ok();
    assert_eq!(reset["attempt"], 2);
    assert_eq!(document(&app, "s").await["stats"]["n_turns"], 0);
    let late = post(&app, "/s~1/v1/chat/completions", &hi()).await;
    assert_eq!(late.status, 410);
    assert_eq!(late.json()["error"]["code"], "session_reset");
    let path = reset["base_path"].as_str().unwrap();
    post(&app, &format!("{path}/chat/completions"), &hi())
        .await
        .ok();
    assert_eq!(document(&app, "s").await["stats"]["n_turns"], 1);
}

/// What is under way while the session is reset comes back to an attempt that is over.
#[tokio::test]
async fn a_call_that_comes_back_after_a_reset_is_not_kept() {
    let app = toy();
    post(&app, "/sessions/s", &json!({})).await.ok();
    let mut body = chat(&[user("hi")], &json!({"max_tokens": 400}));
    body["stream"] = Value::Bool(true);
    let request = HttpRequest::post("/s/v1/chat/completions");
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response = app.clone().oneshot(request).await.unwrap();
    post(&app, "/sessions/s/reset", &json!({})).await.ok();
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 24)
        .await
        .unwrap();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    assert!(text.contains("session_reset"), "{text}");
    assert!(!text.contains("[DONE]"));
    assert_eq!(document(&app, "s").await["stats"]["n_turns"], 0);
}

#[tokio::test]
async fn a_complete_session_takes_no_calls_and_is_still_read() {
    let app = toy();
    post(&app, "/s/v1/chat/completions", &hi()).await.ok();
    let done = post(&app, "/sessions/s/complete", &json!({"reward": 1}))
        .await
        .ok();
    assert_eq!(done, json!({"session_id": "s", "status": "completed"}));
    let refused = post(&app, "/s/v1/chat/completions", &hi()).await;
    assert_eq!(refused.status, 410);
    assert_eq!(
        post(&app, "/sessions/s/reset", &json!({})).await.status,
        410
    );
    let session = fetch(&app, "/sessions/s").await.ok();
    assert_eq!(session["completed"], true);
    let turn = &session["turns"][0];
    assert_eq!(turn["finish_reason"], "length");
    assert_eq!(ids(&turn["completion_token_ids"]).len(), 24);
    assert!(!ids(&turn["prompt_token_ids"]).is_empty());
    let brief = fetch(&app, "/sessions/s?turns=false").await.ok();
    assert_eq!(brief.get("turns"), None);
    assert_eq!(brief["n_turns"], 1);
    assert_eq!(fetch(&app, "/sessions/t").await.status, 404);
}

#[tokio::test]
async fn turns_have_the_messages_that_are_new() {
    let app = toy();
    let first = post(&app, CHAT, &hi()).await.ok();
    let answer = first["choices"][0]["message"].clone();
    let messages = [user("hi"), answer.clone(), user("and?")];
    post(&app, CHAT, &chat(&messages, &json!({}))).await.ok();
    post(&app, CHAT, &chat(&[user("a title, please")], &json!({})))
        .await
        .ok();
    let turns = fetch(&app, "/sessions/s").await.ok()["turns"].clone();
    assert_eq!(turns[0]["request_messages"], json!([user("hi")]));
    assert_eq!(turns[1]["request_messages"], json!([answer, user("and?")]));
    assert_eq!(turns[1]["parent_call_id"], turns[0]["call_id"]);
    assert_eq!(
        turns[2]["request_messages"],
        json!([user("a title, please")])
    );
    assert_eq!(turns[2]["parent_call_id"], Value::Null);
}

#[tokio::test]
async fn an_agent_that_used_up_its_calls_is_told_to_stop() {
    let app = toy();
    let made = json!({"session_id": "s", "max_model_calls": 1});
    post(&app, "/sessions", &made).await.ok();
    post(&app, CHAT, &hi()).await.ok();
    let stop = post(&app, CHAT, &hi()).await.ok();
    assert_eq!(stop["choices"][0]["finish_reason"], "stop");
    let text = stop["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.contains("no calls left"));
    let mut body = hi();
    body["stream"] = Value::Bool(true);
    let streamed = post(&app, "/v1/messages", &body).await;
    assert!(streamed.text.contains("no calls left"), "{}", streamed.text);
    assert_eq!(streamed.events().last().unwrap().0, "message_stop");
    let document = document(&app, "s").await;
    assert_eq!(document["stats"]["n_turns"], 1, "a stop is not recorded");
    assert_eq!(document["budget_stop_count"], 2);
}

#[tokio::test]
async fn a_session_holds_no_more_than_it_may_and_others_go_on() {
    let config = ProxyConfig {
        max_session_bytes: 8000,
        ..open_to_all()
    };
    let app = router(backend(), config);
    let long = chat(&[user(&"x".repeat(1500))], &json!({}));
    let mut refused = None;
    for _ in 0..4 {
        let answer = post(&app, "/a/v1/chat/completions", &long).await;
        if answer.status != 200 {
            refused = Some(answer);
            break;
        }
    }
    let refused = refused.expect("it is full");
    assert_eq!(refused.status, 503);
    assert!(
        refused.text.contains("--max-session-bytes"),
        "{}",
        refused.text
    );
    post(&app, "/b/v1/chat/completions", &hi()).await.ok();
    let gone = HttpRequest::delete("/sessions/a")
        .body(Body::empty())
        .unwrap();
    send(&app, gone).await.ok();
    post(&app, "/a/v1/chat/completions", &hi()).await.ok();
}

#[tokio::test]
async fn what_cannot_be_read_is_refused_in_words() {
    let config = ProxyConfig {
        max_body_bytes: 2000,
        ..open_to_all()
    };
    let app = router(backend(), config);
    for (path, body, status, words) in [
        (CHAT, "{", 400, "not JSON"),
        (CHAT, "[]", 400, "must be a JSON object"),
        (CHAT, r#"{"messages": 1}"#, 400, "messages"),
        (CHAT, r#"{"messages": []}"#, 400, "no message"),
        (CHAT, r#"{"messages": [{"role": "x"}]}"#, 400, "message 0"),
        (CHAT, r#"{"messages": [], "stream": 1}"#, 400, "stream"),
        (
            CHAT,
            r#"{"messages": [{"role": "user"}], "n": 2}"#,
            400,
            "one answer",
        ),
        (
            "/v1/messages",
            r#"{"messages": "x"}"#,
            400,
            "must be a list",
        ),
        (
            "/v1/messages",
            r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#,
            400,
            "block of type `image`",
        ),
        ("/v1/responses", r#"{"input": 3}"#, 400, "`input`"),
        (
            "/v1/responses",
            r#"{"input": [{"type": "item_reference"}]}"#,
            400,
            "item_reference",
        ),
        (
            "/v1/responses",
            r#"{"input": "x", "previous_response_id": "r"}"#,
            400,
            "whole `input`",
        ),
        ("/v1/nothing", "{}", 404, "/v1/nothing"),
    ] {
        let request = HttpRequest::post(path).header(header::AUTHORIZATION, "Bearer s");
        let answer = send(&app, request.body(Body::from(body)).unwrap()).await;
        assert_eq!(answer.status, status, "{path} {body}: {}", answer.text);
        let message = answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(message.contains(words), "{path} {body}: {message}");
    }
    let large = post(
        &app,
        "/v1/messages",
        &chat(&[user(&"x".repeat(3000))], &json!({})),
    )
    .await;
    assert_eq!(large.status, 413);
    assert_eq!(large.json()["error"]["type"], "request_too_large");
}

#[tokio::test]
async fn what_was_captured_is_read_as_the_trainers_rows() {
    let app = toy();
    let first = post(&app, CHAT, &hi()).await.ok();
    let messages = [
        user("hi"),
        first["choices"][0]["message"].clone(),
        user("and?"),
    ];
    post(&app, CHAT, &chat(&messages, &json!({}))).await.ok();
    let path = "/sessions/s/trajectories?reward=0.5&task_id=t&group=3&sample=1";
    let text = fetch(&app, path).await.text;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 1);
    let row: Trajectory = serde_json::from_str(lines[0]).unwrap();
    assert_eq!((row.task_id.as_str(), row.group, row.sample), ("t", 3, 1));
    assert_eq!(row.reward, Some(0.5));
    assert!(row.is_trainable());
    assert_eq!(row.messages.len(), 4);
    let spans: Vec<_> = row.trace.sampled_spans().collect();
    let turns: Vec<_> = row.turns.iter().map(|turn| turn.tokens.clone()).collect();
    assert_eq!(turns, spans);
    let answers: Vec<usize> = row.turns.iter().map(|turn| turn.message).collect();
    assert_eq!(answers, [1, 3]);
    let entries = fetch(&app, "/sessions/s/trace_entries").await.ok()["entries"].clone();
    let last = &entries[1];
    let whole = [
        ids(&last["prompt_token_ids"]),
        ids(&last["completion_token_ids"]),
    ]
    .concat();
    assert_eq!(whole, row.trace.ids());
    assert_eq!(last["loss_mask"].as_array().unwrap().len(), whole.len());
    assert_eq!(last["metadata"]["index"], 1);
    assert_eq!(last["request"]["messages"].as_array().unwrap().len(), 3);
    let unscored = fetch(&app, "/sessions/s/trajectories").await.text;
    let row: Trajectory = serde_json::from_str(unscored.lines().next().unwrap()).unwrap();
    assert!(
        !row.is_trainable(),
        "without a reward there is nothing to learn"
    );
    assert_eq!(
        fetch(&app, "/sessions/s/trajectories?reward=NaN")
            .await
            .status,
        400
    );
}

#[tokio::test]
async fn sessions_are_written_as_they_happen() {
    let folder = tempfile::tempdir().unwrap();
    let config = ProxyConfig {
        out: Some(folder.path().to_owned()),
        ..open_to_all()
    };
    let app = router(backend(), config);
    post(&app, CHAT, &hi()).await.ok();
    post(&app, "/sessions/s/reset", &json!({})).await.ok();
    post(&app, CHAT, &hi()).await.ok();
    post(&app, "/sessions/s/complete", &json!({"reward": 1}))
        .await
        .ok();
    let text = fs_err::read_to_string(folder.path().join("s.jsonl")).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let kinds: Vec<(&str, u64)> = lines
        .iter()
        .map(|line| {
            (
                line["kind"].as_str().unwrap(),
                line["attempt"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        kinds,
        [
            ("session", 1),
            ("call", 1),
            ("reset", 2),
            ("call", 2),
            ("completed", 2)
        ]
    );
    assert_eq!(ids(&lines[1]["completion_token_ids"]).len(), 24);
    assert_eq!(lines[1]["messages"], json!([user("hi")]));
    assert_eq!(lines[4]["told"]["reward"], 1);
}

#[tokio::test]
async fn health_and_metrics_tell_what_there_is() {
    let app = toy();
    post(&app, CHAT, &hi()).await.ok();
    let health = fetch(&app, "/health").await.ok();
    assert_eq!(health["status"], "ok");
    assert_eq!(health["sessions"], 1);
    let metrics = fetch(&app, "/metrics").await.text;
    for line in [
        "proxy_sampled_tokens_total 24",
        "proxy_target_tokens_total 24",
        "proxy_sessions 1",
        "proxy_call_seconds_count 1",
        "http_requests_total{endpoint=\"/v1/chat/completions\",status=\"200\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in {metrics}");
    }
}

#[tokio::test]
async fn each_session_has_its_rate_and_strangers_one_together() {
    let config = ProxyConfig {
        admin_key: Some(ApiKey::new("admin")),
        rate_limit: Some("2/h".parse().unwrap()),
        ..ProxyConfig::default()
    };
    let app = router(backend(), config);
    let as_admin = |request: axum::http::request::Builder| {
        let request = request.header(header::AUTHORIZATION, "Bearer admin");
        request.body(Body::empty()).unwrap()
    };
    for id in ["a", "b"] {
        let opened = send(&app, as_admin(HttpRequest::post(format!("/sessions/{id}")))).await;
        opened.ok();
    }
    let refused = send(&app, as_admin(HttpRequest::get("/sessions"))).await;
    assert_eq!(refused.status, 429, "{}", refused.text);
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");

    let models = |key: String| HttpRequest::get("/v1/models").header("x-api-key", key);
    for (number, status) in [200, 200, 429].into_iter().enumerate() {
        let by_key = models("a".to_owned()).body(Body::empty()).unwrap();
        assert_eq!(send(&app, by_key).await.status, status);
        assert_eq!(fetch(&app, "/b/v1/models").await.status, status);
        // What is made up is no client of its own.
        let by_other = models(number.to_string()).body(Body::empty()).unwrap();
        assert_eq!(send(&app, by_other).await.status, status);
    }
    let refused = send(&app, models("a".to_owned()).body(Body::empty()).unwrap()).await;
    let wait: u64 = refused.headers[header::RETRY_AFTER]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!((1500..=1800).contains(&wait), "{wait}");
    let metrics = fetch(&app, "/metrics").await.text;
    assert!(metrics.contains("http_rate_limited_total 5\n"), "{metrics}");
}

#[tokio::test]
async fn a_models_name_is_kept_at_its_length_alone() {
    let app = toy();
    let mut body = hi();
    body["model"] = Value::from("m".repeat(1 << 20));
    post(&app, CHAT, &body).await.ok();
    let entries = fetch(&app, "/sessions/s/trace_entries").await.ok();
    let model = entries["entries"][0]["metadata"]["model"].as_str().unwrap();
    assert_eq!(model.len(), 200);
}

/// A body that says whether it was read.
fn watched() -> (Body, Arc<std::sync::atomic::AtomicBool>) {
    let is_read = Arc::<std::sync::atomic::AtomicBool>::default();
    let read = Arc::clone(&is_read);
    let pieces = futures_util::stream::iter([()]).map(move |()| {
        read.store(true, std::sync::atomic::Ordering::SeqCst);
        Ok::<_, std::convert::Infallible>("{}")
    });
    (Body::from_stream(pieces), is_read)
}

#[tokio::test]
async fn nothing_is_read_of_who_has_no_key() {
    let config = ProxyConfig {
        admin_key: Some(ApiKey::new("boss")),
        ..ProxyConfig::default()
    };
    let app = router(backend(), config);
    for (path, key, status, reads) in [
        ("/sessions/s", "wrong", 401, false),
        ("/sessions/s", "boss", 200, true),
        (CHAT, "wrong", 401, false),
        ("/wrong/v1/messages", "s", 401, false),
        ("/v1/responses/input_tokens", "wrong", 401, false),
        (CHAT, "s", 400, true),
        ("/v1/chat/completions/s", "wrong", 400, true),
    ] {
        let (body, is_read) = watched();
        let request = HttpRequest::post(path)
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .header(header::CONTENT_LENGTH, "2");
        let answer = send(&app, request.body(body).unwrap()).await;
        assert_eq!(answer.status, status, "{path} {key}: {}", answer.text);
        let is_read = is_read.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(is_read, reads, "{path} {key}");
    }
}

/// A page of theirs whose name leads to this machine, of which a browser says nothing where it only reads.
#[tokio::test]
async fn a_name_that_was_made_to_lead_here_reads_nothing() {
    let app = toy();
    post(&app, CHAT, &hi()).await.ok();
    let guarded = ProxyConfig {
        admin_key: Some(ApiKey::new("boss")),
        ..open_to_all()
    };
    let guarded = router(backend(), guarded);
    let read = async |app: &Router, path: &str, host: &str, peer: [u8; 4]| {
        let request = HttpRequest::get(path)
            .header(header::HOST, host)
            .header(header::AUTHORIZATION, "Bearer boss")
            .extension(http::Peer(std::net::IpAddr::from(peer)));
        send(app, request.body(Body::empty()).unwrap()).await.status
    };
    let here = [127, 0, 0, 1];
    for path in ["/sessions", "/sessions/s", "/sessions/s/rollout"] {
        assert_eq!(read(&app, path, "evil.example:8001", here).await, 403);
        assert_eq!(read(&app, path, "localhost:8001", here).await, 200);
        assert_eq!(read(&app, path, "127.0.0.1:8001", here).await, 200);
        // Over the network, where a machine has a name.
        assert_eq!(read(&app, path, "trainer:8001", [10, 0, 0, 2]).await, 200);
    }
    let host = "proxy.example.org";
    assert_eq!(read(&guarded, "/sessions", host, here).await, 200);
    assert_eq!(read(&app, "/v1/models", host, here).await, 200);
}

#[tokio::test]
async fn where_keys_open_sessions_each_is_no_client_of_its_own() {
    let config = ProxyConfig {
        rate_limit: Some("2/h".parse().unwrap()),
        ..open_to_all()
    };
    let app = router(backend(), config);
    for (number, status) in [200, 200, 429].into_iter().enumerate() {
        let path = format!("/k{number}/v1/chat/completions");
        let answer = post(&app, &path, &hi()).await;
        assert_eq!(answer.status, status, "{}", answer.text);
    }
    // Nor is one that is known.
    assert_eq!(
        post(&app, "/k0/v1/chat/completions", &hi()).await.status,
        429
    );
}
