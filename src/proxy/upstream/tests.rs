//! The proxy in front of servers that do as they should, and of those that do not.

use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::http::header;
use axum::routing::post;
use serde_json::json;
use tokio::net::TcpListener;
use tower::ServiceExt as _;

use super::*;
use crate::http::Listener;
use crate::http::tests_support::{Script, serve, whole, whole_with};
use crate::http::tls::ServerTls;
use crate::http::tls::tests_support::{Authority, Folder};
use crate::proxy::{App, Backend, ProxyConfig, router, router_of};

/// A stream of these events, a pause before each.
fn stream(events: &[(u64, String)]) -> Script {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\
        Connection: close\r\n\r\n";
    let mut script = vec![(0, head.to_owned())];
    script.extend(events.iter().cloned());
    script
}

fn completion(change: impl Fn(&mut Value)) -> Value {
    let mut completion = json!({
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "yes", "refusal": null},
            "finish_reason": "stop",
            "token_ids": [7, 8],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        }],
        "prompt_token_ids": [1, 2, 3],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    });
    change(&mut completion);
    completion
}

fn proxy(url: &str, change: impl Fn(&mut UpstreamConfig)) -> Router {
    let mut config = UpstreamConfig::new(url);
    config.timeout = Duration::from_secs(20);
    change(&mut config);
    let backend = Backend::Upstream(Upstream::new(config).unwrap());
    let config = ProxyConfig {
        opens_sessions: true,
        ..ProxyConfig::default()
    };
    router(backend, config)
}

async fn ask(app: &Router, session: &str, fields: Value) -> (u16, String) {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    let path = format!("/{session}/v1/chat/completions");
    let request = axum::http::Request::post(path).body(Body::from(body.to_string()));
    let response = app.clone().oneshot(request.unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 24)
        .await
        .unwrap();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

async fn read_json(app: &Router, path: &str) -> Value {
    let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
    let response = app.clone().oneshot(request).await.unwrap();
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 24)
        .await
        .unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

async fn document(app: &Router, session: &str) -> Value {
    read_json(app, &format!("/sessions/{session}/rollout")).await
}

#[tokio::test]
async fn ids_are_asked_for_and_taken_as_they_are_told() {
    let url = serve(|asked| {
        assert_eq!(asked["return_token_ids"], true);
        assert_eq!(asked["logprobs"], true);
        assert_eq!(asked["model"], "real");
        assert_eq!(
            asked["metadata"]["run"], "7",
            "what is not ours is passed on"
        );
        // The model's own distribution, whatever the server has for it.
        assert_eq!(asked["top_k"], -1);
        assert_eq!(asked["top_p"], 1);
        whole("200 OK", &completion(|_| {}).to_string())
    });
    let app = proxy(&url, |config| config.model = Some("real".to_owned()));
    let (status, text) = ask(&app, "s", json!({"metadata": {"run": "7"}})).await;
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "yes");
    assert_eq!(
        answer["choices"][0]["logprobs"],
        Value::Null,
        "nobody asked for them"
    );
    assert_eq!(answer["choices"][0].get("token_ids"), None);
    let document = document(&app, "s").await;
    let row = &document["sequences"][0];
    assert_eq!(row["input_ids"], json!([1, 2, 3, 7, 8]));
    assert_eq!(row["loss_mask"], json!([0, 0, 0, 1, 1]));
    assert_eq!(row["logprobs"], json!([0.0, 0.0, 0.0, -0.5, -0.25]));
    assert_eq!(document["trainable"], true);
}

#[rstest::rstest]
#[case::a_regular_expression(json!({"guided_regex": "x+"}))]
#[case::a_schema(json!({"response_format": {"type": "json_object"}}))]
#[case::a_call(json!({"tool_choice": "required"}))]
#[case::forbidden_tokens(json!({"bad_words": ["no"]}))]
#[case::a_narrower_distribution(json!({"top_k": 20}))]
#[tokio::test]
async fn what_the_model_did_not_choose_freely_is_context(#[case] field: Value) {
    let expected = field.clone();
    let url = serve(move |asked| {
        for (name, value) in expected.as_object().unwrap() {
            assert_eq!(&asked[name], value, "it is passed on");
        }
        whole("200 OK", &completion(|_| {}).to_string())
    });
    let app = proxy(&url, |_| {});
    let (status, text) = ask(&app, "s", field).await;
    assert_eq!(status, 200, "{text}");
    let document = document(&app, "s").await;
    let row = &document["sequences"][0];
    assert_eq!(row["loss_mask"], json!([0, 0, 0, 0, 0]));
}

fn chunk(delta: &Value, more: &Value) -> String {
    let mut choice = json!({"index": 0, "delta": delta, "finish_reason": null});
    for (key, value) in more.as_object().unwrap() {
        choice[key] = value.clone();
    }
    format!("data: {}\n\n", json!({"choices": [choice]}))
}

/// A good stream in the order in which vLLM sends it.
fn good_chunks() -> Vec<(u64, String)> {
    let logprob = |value: f32| json!({"content": [{"logprob": value}]});
    let first = json!({
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
        "prompt_token_ids": [1, 2, 3],
    });
    let call = |call: Value| json!({"tool_calls": [call]});
    vec![
        (0, format!(": hello\n\ndata: {first}\n\n")),
        (
            5,
            chunk(
                &json!({"content": "yé"}),
                &json!({"token_ids": [7], "logprobs": logprob(-0.5)}),
            ),
        ),
        (
            5,
            chunk(
                &call(
                    json!({"index": 0, "id": "c", "function": {"name": "f", "arguments": "{\"a\""}}),
                ),
                &json!({"token_ids": [8], "logprobs": logprob(-0.25)}),
            ),
        ),
        (
            5,
            chunk(
                &call(json!({"index": 0, "function": {"arguments": ": 1}"}})),
                &json!({"finish_reason": "tool_calls"}),
            ),
        ),
        (
            0,
            format!(
                "data: {}\n\n",
                json!({
                    "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2},
                })
            ),
        ),
        (0, "data: [DONE]\n\n".to_owned()),
    ]
}

#[tokio::test]
async fn a_stream_of_the_upstream_is_passed_on_and_put_together() {
    let url = serve(|asked| {
        assert_eq!(asked["stream"], true);
        stream(&good_chunks())
    });
    let app = proxy(&url, |config| config.is_streamed = true);
    let (status, text) = ask(&app, "s", json!({"stream": true})).await;
    assert_eq!(status, 200);
    assert!(text.contains(r#""content":"yé""#), "{text}");
    assert!(text.contains(r#""arguments":"{\"a\": 1}""#), "{text}");
    assert!(text.contains(r#""finish_reason":"tool_calls""#), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"));
    let (_, text) = ask(&app, "t", json!({})).await;
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"],
        "f"
    );
    for session in ["s", "t"] {
        let document = document(&app, session).await;
        let row = &document["sequences"][0];
        assert_eq!(row["input_ids"], json!([1, 2, 3, 7, 8]));
        assert_eq!(row["logprobs"][3], -0.5);
        assert_eq!(document["trainable"], true);
    }
}

/// Each thing that an upstream can say wrong is an error for the one who asked, and nothing is kept.
#[tokio::test]
async fn what_an_upstream_says_wrong_is_one_clients_error() {
    let bad = |change: fn(&mut Value)| whole("200 OK", &completion(change).to_string());
    let after_first = |rest: &str| {
        let mut events = good_chunks();
        events.truncate(2);
        events.push((0, rest.to_owned()));
        stream(&events)
    };
    let cases: Vec<(Script, &str)> = vec![
        (whole("200 OK", "{"), "no JSON"),
        (whole("200 OK", "[]"), "no list of `choices`"),
        (whole("200 OK", r#"{"choices": [1]}"#), "no `message`"),
        (bad(|answer| answer["choices"] = json!([])), "0 choices"),
        (
            bad(|answer| answer["choices"][0]["finish_reason"] = Value::Null),
            "`finish_reason`",
        ),
        (
            bad(|answer| answer["choices"][0]["message"]["content"] = json!(1)),
            "`content`",
        ),
        (
            bad(|answer| answer["choices"][0]["message"]["tool_calls"] = json!([1])),
            "tool call",
        ),
        (
            bad(|answer| answer["choices"][0]["token_ids"] = json!([7])),
            "counted 2",
        ),
        (
            bad(|answer| answer["choices"][0]["token_ids"] = json!([-7, 1])),
            "no token id",
        ),
        (
            bad(|answer| answer["prompt_token_ids"] = json!([1])),
            "counted 3",
        ),
        (
            bad(|answer| answer["choices"][0]["logprobs"]["content"] = json!([{"logprob": -1}])),
            "1 log-probabilities",
        ),
        (
            bad(|answer| answer["choices"][0]["logprobs"]["content"][0]["logprob"] = json!(2)),
            "log-probability",
        ),
        (
            bad(|answer| answer["usage"]["completion_tokens"] = json!(u64::MAX)),
            "counted 18446744073709551615 tokens",
        ),
        (whole("200 OK", &"x".repeat(5000)), "more than 4096 bytes"),
        (whole("500 Oops", r#"{"error": "sk-secret"}"#), "status 500"),
        (
            whole("401 No", r#"{"error": {"message": "key sk-secret"}}"#),
            "status 401",
        ),
        (
            whole("302 Found\r\nLocation: http://127.0.0.1:1/", ""),
            "the upstream failed",
        ),
        (
            vec![(0, "nonsense\r\n\r\n".to_owned())],
            "the upstream failed",
        ),
        (vec![], "the upstream failed"),
        (stream(&[]), "ended before the answer did"),
        (after_first("data: {oops}\n\n"), "no JSON"),
        (after_first("data: [1]\n\n"), "no object"),
        (
            after_first("data: {\"choices\": 1}\n\n"),
            "no list of `choices`",
        ),
        (after_first("data: {\"choices\": [1]}\n\n"), "no object"),
        (
            after_first("data: {\"error\": {\"message\": \"out of memory\"}}\n\n"),
            "out of memory",
        ),
        (
            after_first("data: [DONE]\n\n"),
            "ended before the answer did",
        ),
        (after_first("data: {\"choices\""), "ends within an event"),
        (
            after_first(&format!("data: {}", "x".repeat(5000))),
            "more than 4096 bytes",
        ),
        (
            after_first(&chunk(&json!({"tool_calls": [{"index": 3}]}), &json!({}))),
            "not in order",
        ),
    ];
    for (number, (script, words)) in cases.into_iter().enumerate() {
        let answer = script.clone();
        let url = serve(move |_| answer.clone());
        let app = proxy(&url, |config| config.max_response_bytes = 4096);
        for streams in [false, true] {
            let (status, text) = ask(&app, "s", json!({"stream": streams})).await;
            let begun = streams && status == 200;
            assert!(begun || status == 502, "case {number}: {status} {text}");
            assert!(text.contains(words), "case {number}: {text}");
            assert!(!text.contains("sk-secret"), "case {number}: {text}");
            assert!(!text.contains("[DONE]"), "case {number}: {text}");
        }
        let document = document(&app, "s").await;
        assert_eq!(document["stats"]["n_turns"], 0, "case {number}");
        let session = read_json(&app, "/sessions/s").await;
        assert_eq!(session["upstream_errors"], 2, "case {number}");
    }
}

#[tokio::test]
async fn what_the_client_can_mend_is_told_in_the_upstreams_words() {
    let url = serve(|_| whole("400 Bad", r#"{"error": {"message": "too many tokens"}}"#));
    let app = proxy(&url, |_| {});
    for streams in [false, true] {
        let (status, text) = ask(&app, "s", json!({"stream": streams})).await;
        assert_eq!(status, 400);
        assert!(text.contains("too many tokens"), "{text}");
    }
}

/// One upstream that says nothing: whoever waits is told, the others are served meanwhile.
#[tokio::test]
async fn a_stall_is_one_clients_error_and_no_one_elses() {
    let url = serve(|asked| match asked["user"].as_str() {
        Some("slow") => {
            let mut events = good_chunks();
            events[2].0 = 4000;
            stream(&events)
        }
        _ => stream(&good_chunks()),
    });
    let app = proxy(&url, |config| {
        config.is_streamed = true;
        config.stall_timeout = Duration::from_millis(500);
        config.max_calls = 2;
    });
    let slow = |streams: bool| {
        let app = app.clone();
        tokio::spawn(
            async move { ask(&app, "slow", json!({"user": "slow", "stream": streams})).await },
        )
    };
    let started = Instant::now();
    let waiting = slow(true);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (status, _) = ask(&app, "quick", json!({})).await;
    assert_eq!(status, 200);
    assert!(!waiting.is_finished(), "the quick one was served meanwhile");
    let (status, text) = waiting.await.unwrap();
    assert!(
        status == 200 && text.contains("said nothing for 500ms"),
        "{status} {text}"
    );
    assert!(started.elapsed() < Duration::from_secs(4));
    let (status, text) = slow(false).await.unwrap();
    assert_eq!(status, 504);
    assert!(text.contains("upstream_stalled"), "{text}");
    assert_eq!(document(&app, "slow").await["stats"]["n_turns"], 0);
    assert_eq!(document(&app, "quick").await["trainable"], true);
}

#[tokio::test]
async fn a_server_that_tells_no_ids_gives_context_and_never_a_target() {
    let url = serve(|asked| {
        assert_eq!(asked.get("return_token_ids"), None);
        let answer = completion(|answer| {
            answer["choices"][0]["token_ids"].take();
            answer["choices"][0]["logprobs"].take();
            answer["prompt_token_ids"].take();
        });
        whole("200 OK", &answer.to_string())
    });
    let app = proxy(&url, |config| config.asks_for_ids = false);
    ask(&app, "s", json!({})).await;
    let messages = json!([
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]);
    ask(&app, "s", json!({"messages": messages})).await;
    let document = document(&app, "s").await;
    assert_eq!(
        document["stats"]["n_roots"], 1,
        "messages tell what goes on from what"
    );
    assert_eq!(document["capture_level"], "text");
    assert_eq!(document["rollout_type"], "eval");
    assert_eq!(document["trainable"], false);
    assert_eq!(document["sequences"], json!([]));
    let entries = read_json(&app, "/sessions/s/trace_entries").await;
    assert!(
        entries["error"].as_str().unwrap().contains("no token ids"),
        "{entries}"
    );
}

#[tokio::test]
async fn more_calls_than_are_let_in_are_told_to_come_back() {
    let url = serve(|_| {
        let mut script = whole("200 OK", &completion(|_| {}).to_string());
        script[0].0 = 1500;
        script
    });
    let app = proxy(&url, |config| config.max_calls = 1);
    let first = {
        let app = app.clone();
        tokio::spawn(async move { ask(&app, "s", json!({})).await })
    };
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (status, text) = ask(&app, "t", json!({})).await;
    assert_eq!(status, 429, "{text}");
    assert_eq!(first.await.unwrap().0, 200);
}

#[tokio::test]
async fn an_upstream_behind_tls_is_shown_a_certificate() {
    let (root, clients, folder) = (Authority::new(), Authority::new(), Folder::new());
    let files = TlsFiles {
        certificate: Some(folder.bundle("server.pem", &root.issue("127.0.0.1"))),
        key: None,
        ca: Some(folder.write("clients.pem", &clients.pem())),
    };
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/v1", tcp.local_addr().unwrap());
    let listener = Listener::new(tcp, Some(ServerTls::new(files).unwrap()));
    let answer = completion(|_| {}).to_string();
    let whole = async move || ([(header::CONTENT_TYPE, "application/json")], answer.clone());
    let upstream = Router::new().route("/v1/chat/completions", post(whole));
    let never = std::future::pending();
    tokio::spawn(crate::http::serve(
        listener,
        upstream,
        never,
        Duration::ZERO,
    ));

    let certificate = Some(folder.bundle("proxy.pem", &clients.issue("proxy")));
    for (certificate, status) in [(None, 502), (certificate, 200)] {
        let tls = TlsFiles {
            certificate,
            ..folder.trusting(&root)
        };
        let app = proxy(&url, |config| config.tls = tls.clone());
        let (answered, text) = ask(&app, "s", json!({})).await;
        assert_eq!(answered, status, "{text}");
        let part = match status {
            200 => "\"yes\"",
            _ => "CertificateRequired",
        };
        assert!(text.contains(part), "{text}");
    }
    // The roots of the web have not signed it.
    let app = proxy(&url, |_| {});
    let (status, text) = ask(&app, "s", json!({})).await;
    assert!(status == 502 && text.contains("UnknownIssuer"), "{text}");

    // Not at its first call.
    let config = UpstreamConfig {
        tls: TlsFiles {
            ca: Some(folder.write("empty.pem", "")),
            ..TlsFiles::default()
        },
        ..UpstreamConfig::new(&url)
    };
    let refused = Upstream::new(config).map(drop);
    assert!(
        matches!(refused, Err(TlsError::NoCertificate { .. })),
        "{refused:?}"
    );
}

/// A few megabytes that would be gigabytes in memory.
#[tokio::test]
async fn an_answer_of_countless_values_is_refused_before_it_is_read() {
    let objects = |bytes: usize| format!("[{}0]", r#"{"":0},"#.repeat(bytes / 7));
    let many = objects(8 << 20);
    let in_whole = format!(r#"{{"choices": {many}}}"#);
    // None of the pieces is too large by itself.
    let piece = objects(256 << 10);
    let choice = format!(r#"{{"index": 0, "delta": {{}}, "logprobs": {{"content": {piece}}}}}"#);
    let event = format!("data: {{\"choices\": [{choice}]}}\n\n");
    let whole_url = serve(move |_| whole("200 OK", &in_whole));
    let one_event = format!("data: {{\"choices\": {many}}}\n\n");
    let event_url = serve(move |_| stream(&[(0, one_event.clone())]));
    let pieces_url = serve(move |_| stream(&vec![(0, event.clone()); 64]));
    for url in [whole_url, event_url, pieces_url] {
        for asks_for_ids in [true, false] {
            let app = proxy(&url, |config| {
                config.asks_for_ids = asks_for_ids;
                config.is_streamed = true;
            });
            let (status, text) = ask(&app, "s", json!({})).await;
            let limit = if asks_for_ids { 1 << 21 } else { 1 << 18 };
            let told = format!("its answer has more than {limit} JSON values");
            assert!(status == 502 && text.contains(&told), "{status} {text}");
        }
    }
}

/// Each token of an answer that is learned from takes some values.
#[tokio::test]
async fn a_long_answer_with_ids_is_read() {
    let tokens = 60_000;
    let entry = json!({"token": "ab", "logprob": -0.5, "bytes": [97, 98], "top_logprobs": []});
    let answer = completion(|answer| {
        answer["choices"][0]["token_ids"] = json!(vec![7; tokens]);
        answer["choices"][0]["logprobs"]["content"] = json!(vec![entry.clone(); tokens]);
        answer["usage"]["completion_tokens"] = json!(tokens);
    });
    let answer = answer.to_string();
    let url = serve(move |_| whole("200 OK", &answer));
    let app = proxy(&url, |_| {});
    let (status, text) = ask(&app, "s", json!({})).await;
    assert_eq!(status, 200, "{text}");
    assert_eq!(document(&app, "s").await["trainable"], true);
}

async fn post_to(app: &Router, path: &str, body: &Value) -> axum::response::Response {
    let request = axum::http::Request::post(path).body(Body::from(body.to_string()));
    app.clone().oneshot(request.unwrap()).await.unwrap()
}

#[tokio::test]
async fn a_call_that_the_upstream_fails_costs_an_agent_none_of_its_calls() {
    let url = serve(|asked| match asked["user"].as_str() {
        Some("down") => whole_with("503 Down", "Retry-After: 60\r\n", "{}"),
        Some("busy") => whole_with("429 Busy", "Retry-After: 7\r\n", "{}"),
        Some("wrong") => whole("400 Bad", "{}"),
        Some("broken") => stream(&good_chunks()[..2]),
        _ => whole("200 OK", &completion(|_| {}).to_string()),
    });
    let app = proxy(&url, |_| {});
    let made = json!({"session_id": "s", "max_model_calls": 2});
    post_to(&app, "/sessions", &made).await;
    for (user, status, pause) in [
        ("down", 502, Some("60")),
        ("busy", 429, Some("7")),
        ("broken", 502, None),
    ] {
        for _ in 0..2 {
            let body = json!({"messages": [{"role": "user", "content": "hi"}], "user": user});
            let answer = post_to(&app, "/s/v1/chat/completions", &body).await;
            assert_eq!(answer.status().as_u16(), status, "{user}");
            let told = answer.headers().get(header::RETRY_AFTER);
            assert_eq!(told.map(|told| told.to_str().unwrap()), pause, "{user}");
        }
    }
    // The agent has a part of this one, and is not to blame either.
    let (_, text) = ask(&app, "s", json!({"user": "broken", "stream": true})).await;
    assert!(text.contains("ended before the answer did"), "{text}");
    // This one is its own doing.
    assert_eq!(ask(&app, "s", json!({"user": "wrong"})).await.0, 400);
    let (_, text) = ask(&app, "s", json!({})).await;
    assert!(text.contains("yes"), "{text}");
    let (_, text) = ask(&app, "s", json!({})).await;
    assert!(text.contains("no calls left"), "{text}");
    let session = read_json(&app, "/sessions/s").await;
    assert_eq!(session["upstream_errors"], 8);
    assert_eq!(session["faults"], 7);
    let document = document(&app, "s").await;
    let faults = "[WARN] faults: 7 calls failed by no fault of the agent's";
    let findings = document["validation"].as_array().unwrap();
    assert!(
        findings.iter().any(|finding| finding == faults),
        "{findings:?}"
    );
}

#[tokio::test]
async fn a_request_without_a_model_is_passed_on_without_one() {
    let url = serve(|asked| match asked.get("model") {
        None => whole("200 OK", &completion(|_| {}).to_string()),
        Some(model) => whole("400 Bad", &json!({"message": model}).to_string()),
    });
    let app = proxy(&url, |_| {});
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let answer = post_to(&app, "/s/v1/chat/completions", &body).await;
    assert_eq!(answer.status().as_u16(), 200);
}

#[tokio::test]
async fn who_reads_nothing_of_a_stream_holds_no_place_of_the_upstreams() {
    let url = serve(|asked| match asked["user"].as_str() {
        // More than all that is between the upstream and its client.
        Some("deaf") => {
            let piece = chunk(&json!({"content": "x".repeat(16 << 10)}), &json!({}));
            stream(&vec![(0, piece); 1000])
        }
        _ => stream(&good_chunks()),
    });
    let upstream = Upstream::new(UpstreamConfig {
        is_streamed: true,
        max_calls: 1,
        ..UpstreamConfig::new(url)
    });
    let config = ProxyConfig {
        opens_sessions: true,
        ..ProxyConfig::default()
    };
    let mut app = App::new(Backend::Upstream(upstream.unwrap()), config);
    Arc::get_mut(&mut app).unwrap().read_within = Duration::from_millis(500);
    let app = router_of(app);
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "stream": true, "user": "deaf",
    });
    let deaf = post_to(&app, "/deaf/v1/chat/completions", &body).await;
    assert_eq!(deaf.status().as_u16(), 200);
    let (started, mut refused) = (Instant::now(), 0);
    loop {
        let (status, text) = ask(&app, "quick", json!({})).await;
        if status == 200 {
            break;
        }
        assert_eq!(status, 429, "{text}");
        refused += 1;
        assert!(started.elapsed() < Duration::from_secs(60), "it is held");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(refused > 0, "the place was taken");
    drop(deaf);
}

/// A key goes to nobody but the upstream.
#[tokio::test]
async fn without_tls_no_proxy_of_the_environment_is_asked() {
    if std::env::var_os("HTTP_PROXY").is_none() {
        let name = "proxy::upstream::tests::without_tls_no_proxy_of_the_environment_is_asked";
        let again = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env("HTTP_PROXY", "http://127.0.0.1:1")
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&again.stdout);
        assert!(again.status.success(), "{told}");
        assert!(told.contains("1 passed"), "{told}");
        return;
    }
    let url = serve(|_| whole("200 OK", &completion(|_| {}).to_string()));
    let (status, text) = ask(&proxy(&url, |_| {}), "s", json!({})).await;
    assert_eq!(status, 200, "{text}");
}
