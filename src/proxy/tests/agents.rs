//! What agents of each API get, and what is captured of it.

use super::*;

/// What a client was told of one answer: the text, the ids that were fed and sampled.
struct Told {
    message: Value,
    prompt: Vec<u32>,
    completion: Vec<u32>,
}

async fn chat_turn(app: &Router, messages: &[Value], fields: &Value) -> Told {
    let mut body = chat(messages, fields);
    body["return_token_ids"] = Value::Bool(true);
    let answer = ask(app, CHAT, &body).await.ok();
    Told {
        message: answer["choices"][0]["message"].clone(),
        prompt: ids(&answer["prompt_token_ids"]),
        completion: ids(&answer["choices"][0]["token_ids"]),
    }
}

/// The toy model samples bytes that are no UTF-8, so its text encodes to other ids than were sampled.
#[tokio::test]
async fn a_conversation_goes_on_from_the_ids_that_were_sampled() {
    let app = toy();
    let mut messages = vec![json!({"role": "system", "content": "be"}), user("hi")];
    let mut end = Vec::new();
    let mut drifts = 0;
    let mut completions = Vec::new();
    for turn in 0..4 {
        let told = chat_turn(&app, &messages, &json!({"seed": turn})).await;
        assert!(told.prompt.starts_with(&end), "turn {turn}");
        if turn == 0 {
            let text = tokenizer().decode(&told.prompt).unwrap();
            assert_eq!(
                text,
                "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            );
        } else {
            // The turn was cut off, so it is closed for it.
            let new = tokenizer().decode(&told.prompt[end.len()..]).unwrap();
            let user = format!("\n<|im_start|>user\nand {turn}<|im_end|>\n<|im_start|>assistant\n");
            assert_eq!(new.trim_start_matches("<|im_end|>"), user);
            assert!(new.len() >= user.len());
        }
        let text = told.message["content"].as_str().unwrap().to_owned();
        drifts += usize::from(tokenizer().encode_ordinary(&text).unwrap() != told.completion);
        end = [told.prompt, told.completion.clone()].concat();
        completions.push(told.completion);
        messages.push(json!({"role": "assistant", "content": text, "extra": null}));
        messages.push(user(&format!("and {}", turn + 1)));
    }
    assert!(drifts > 0, "text and ids agree, so nothing was shown");
    let document = document(&app, "s").await;
    assert_eq!(document["stats"]["n_roots"], 1);
    assert_eq!(document["trainable"], true, "{}", document["validation"]);
    let [row] = document["sequences"].as_array().unwrap().as_slice() else {
        panic!("{document}");
    };
    assert_eq!(ids(&row["input_ids"]), end);
    let mask = ids(&row["loss_mask"]);
    let targets: Vec<u32> = (end.iter().zip(&mask))
        .filter_map(|(id, mask)| (*mask == 1).then_some(*id))
        .collect();
    assert_eq!(targets, completions.concat());
}

#[tokio::test]
async fn a_history_that_was_changed_is_a_new_root() {
    let app = toy();
    let first = chat_turn(&app, &[user("hi")], &json!({"seed": 1})).await;
    let text = first.message["content"].as_str().unwrap();
    for history in [
        vec![
            user("hi"),
            json!({"role": "assistant", "content": format!("!{text}")}),
            user("go"),
        ],
        vec![
            user("hi"),
            json!({"role": "assistant", "content": "summary"}),
            user("go"),
        ],
        vec![user("Summary so far: nothing"), user("go")],
    ] {
        chat_turn(&app, &history, &json!({"seed": 2})).await;
    }
    let document = document(&app, "s").await;
    assert_eq!(document["stats"]["n_roots"], 4);
    assert_eq!(document["stats"]["n_sequences"], 4);
    let warning = document["validation"][0].as_str().unwrap();
    assert!(warning.contains("per_turn_capture_only"), "{warning}");
}

#[tokio::test]
async fn a_stop_string_that_is_put_back_goes_on() {
    let app = toy();
    let whole = chat_turn(&app, &[user("hi")], &json!({"seed": 3})).await;
    // A character that the answer has, and what is before it.
    let text = whole.message["content"].as_str().unwrap().to_owned();
    let (at, stop) = text
        .char_indices()
        .find(|(at, c)| *at > 2 && c.is_ascii_graphic() && !text[..*at].trim().is_empty())
        .unwrap();
    let fields = json!({"seed": 3, "stop": [stop.to_string()]});
    let cut = chat_turn(&app, &[user("hi")], &fields).await;
    let said = cut.message["content"].as_str().unwrap();
    assert!(text.starts_with(said) && said.len() <= at);
    let end = [cut.prompt, cut.completion].concat();
    for (content, added) in [
        (format!("{said}{stop}"), Some("")),
        (format!("{said}{stop} ok"), Some(" ok")),
        (said.to_owned(), None),
    ] {
        let answer = json!({"role": "assistant", "content": content});
        let next = chat_turn(&app, &[user("hi"), answer, user("go")], &json!({"seed": 4})).await;
        assert_eq!(
            next.prompt.starts_with(&end),
            added.is_some(),
            "{content:?}"
        );
        if let Some(added) = added {
            let new = tokenizer().decode(&next.prompt[end.len()..]).unwrap();
            assert!(new.starts_with(&format!("{added}<|im_end|>\n")), "{new}");
        }
    }
}

#[tokio::test]
async fn parallel_calls_and_retries_do_not_mix() {
    let app = toy();
    let first = chat_turn(&app, &[user("hi")], &json!({"seed": 1})).await;
    let history = [user("hi"), first.message.clone()];
    let branches = [("left", 1), ("right", 2), ("right", 3)].map(|(text, seed)| {
        let messages = [&history[..], &[user(text)]].concat();
        let app = app.clone();
        tokio::spawn(async move { chat_turn(&app, &messages, &json!({"seed": seed})).await })
    });
    let mut told = Vec::new();
    for branch in branches {
        told.push(branch.await.unwrap());
    }
    let used = [
        &history[..],
        &[user("right"), told[2].message.clone(), user("on")],
    ]
    .concat();
    let last = chat_turn(&app, &used, &json!({"seed": 9})).await;
    let document = document(&app, "s").await;
    assert_eq!(document["stats"]["n_roots"], 1);
    assert_eq!(
        document["stats"]["n_discarded"], 1,
        "one of the two `right`"
    );
    let mut roles: Vec<&str> = document["sequences"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["role"].as_str().unwrap())
        .collect();
    roles.sort_unstable();
    assert_eq!(roles, ["agent", "agent", "discarded"]);
    let whole = [last.prompt, last.completion].concat();
    let rows = document["sequences"].as_array().unwrap();
    assert!(rows.iter().any(|row| ids(&row["input_ids"]) == whole));
}

fn joined(datas: &[Value], read: impl Fn(&Value) -> &Value) -> String {
    datas
        .iter()
        .filter_map(|data| read(data).as_str())
        .collect()
}

#[tokio::test]
async fn a_chat_stream_tells_what_the_whole_answer_tells() {
    let app = toy();
    let fields = json!({"seed": 5, "return_token_ids": true, "logprobs": true, "top_logprobs": 1});
    let whole = ask(&app, CHAT, &chat(&[user("hi")], &fields)).await.ok();
    assert_eq!(
        whole["model"], "gpt-9",
        "agents get the name that they know"
    );
    let mut body = chat(&[user("hi")], &fields);
    body["stream"] = Value::Bool(true);
    body["stream_options"] = json!({"include_usage": true});
    let answer = ask(&app, CHAT, &body).await;
    assert_eq!(answer.events().last().unwrap().1, "[DONE]");
    let chunks = answer.datas();
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!(
        usage["usage"]["completion_tokens"],
        whole["usage"]["completion_tokens"]
    );
    assert!(chunks.len() > 3, "it comes piece by piece");
    let choice = &whole["choices"][0];
    let text = joined(chunks, |chunk| &chunk["choices"][0]["delta"]["content"]);
    assert_eq!(text, choice["message"]["content"].as_str().unwrap());
    let last = &chunks[chunks.len() - 1];
    for key in ["finish_reason", "token_ids", "logprobs"] {
        assert_eq!(last["choices"][0][key], choice[key]);
    }
    assert_eq!(last["prompt_token_ids"], whole["prompt_token_ids"]);
    let rows = document(&app, "s").await["sequences"].clone();
    assert_eq!(rows[0]["input_ids"], rows[1]["input_ids"], "the same seed");
}

#[tokio::test]
async fn anthropics_messages_are_captured_and_go_on() {
    let app = toy();
    let mut body = json!({
        "model": "claude-9", "max_tokens": 24, "seed": 1, "system": [{"type": "text", "text": "be"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [
            {"name": "f", "description": "d", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
    });
    let count = ask(&app, "/v1/messages/count_tokens", &body).await.ok();
    let whole = ask(&app, "/v1/messages", &body).await.ok();
    assert_eq!(whole["type"], "message");
    assert_eq!(whole["model"], "claude-9");
    assert_eq!(whole["usage"]["input_tokens"], count["input_tokens"]);
    assert_eq!(whole["usage"]["output_tokens"], 24);
    assert_eq!(whole["stop_reason"], "max_tokens");
    assert_eq!(whole["content"][0]["type"], "text");
    let turns = body["messages"].as_array_mut().unwrap();
    turns.push(json!({"role": "assistant", "content": whole["content"]}));
    turns.push(json!({"role": "user", "content": "and?"}));
    body["stream"] = Value::Bool(true);
    let answer = ask(&app, "/v1/messages", &body).await;
    let names: Vec<String> = answer.events().into_iter().map(|event| event.0).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(
        names[names.len() - 3..],
        ["content_block_stop", "message_delta", "message_stop"]
    );
    let datas = answer.datas();
    assert!(
        datas
            .iter()
            .zip(&names)
            .all(|(data, name)| data["type"] == name.as_str())
    );
    let text = joined(&datas, |data| &data["delta"]["text"]);
    let document = document(&app, "s").await;
    assert_eq!(document["stats"]["n_roots"], 1);
    let turn = &document["turns"][1];
    assert_eq!(turn["response_message"]["content"], text);
    assert_eq!(turn["n_tools"], 1, "what Anthropic runs itself is not ours");
    assert_eq!(
        turn["request_messages"][0],
        json!({"role": "system", "content": "be"})
    );
    assert_eq!(document["stats"]["n_trainable_tokens"], 48);
}

#[tokio::test]
async fn responses_are_captured_and_go_on() {
    let app = toy();
    let mut body = json!({
        "model": "gpt-9", "max_output_tokens": 24, "seed": 1, "instructions": "be", "input": "hi",
    });
    let whole = ask(&app, "/v1/responses", &body).await.ok();
    assert_eq!(whole["object"], "response");
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(whole["usage"]["output_tokens"], 24);
    let item = &whole["output"][0];
    assert_eq!(item["type"], "message");
    body["input"] = json!([
        {"role": "user", "content": "hi"}, item, {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "and?"},
        ]},
    ]);
    let count = ask(&app, "/v1/responses/input_tokens", &body).await.ok();
    assert!(count["input_tokens"].as_u64().unwrap() > 24);
    body["stream"] = Value::Bool(true);
    let answer = ask(&app, "/v1/responses", &body).await;
    let names: Vec<String> = answer.events().into_iter().map(|event| event.0).collect();
    assert_eq!(
        names[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(
        names[names.len() - 4..],
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete"
        ]
    );
    let datas = answer.datas();
    for (number, data) in datas.iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
    }
    let is_delta = |data: &&Value| data["type"] == "response.output_text.delta";
    let deltas: Vec<Value> = datas.iter().filter(is_delta).cloned().collect();
    let text = joined(&deltas, |data| &data["delta"]);
    let response = &datas[datas.len() - 1]["response"];
    assert_eq!(response["output"][0]["content"][0]["text"], text);
    let document = document(&app, "s").await;
    assert_eq!(document["stats"]["n_roots"], 1);
    assert_eq!(document["stats"]["n_trainable_tokens"], 48);
}

/// A conversation may change its API: what is compared is what is said.
#[tokio::test]
async fn an_answer_of_one_api_is_gone_on_with_by_another() {
    let app = toy();
    let first = chat_turn(&app, &[user("hi")], &json!({})).await;
    let text = first.message["content"].clone();
    let body = json!({"model": "c", "max_tokens": 8, "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": text},
        {"role": "user", "content": "and?"},
    ]});
    ask(&app, "/v1/messages", &body).await.ok();
    assert_eq!(document(&app, "s").await["stats"]["n_roots"], 1);
}

#[tokio::test]
async fn sampling_that_a_trainer_cannot_score_again_is_context() {
    let app = toy();
    for (fields, why) in [
        (json!({"top_p": 0.5}), "top_p"),
        (json!({"temperature": 0}), "temperature"),
        (json!({"logit_bias": {"65": 5}}), "logit_bias"),
    ] {
        chat_turn(&app, &[user(why)], &fields).await;
        let document = document(&app, "s").await;
        let turn = document["turns"]
            .as_array()
            .unwrap()
            .last()
            .unwrap()
            .clone();
        assert!(
            turn["why_context"].as_str().unwrap().contains(why),
            "{turn}"
        );
    }
    let document = document(&app, "s").await;
    assert_eq!(document["trainable"], false);
    let entries = fetch(&app, "/sessions/s/trace_entries").await;
    assert_eq!(entries.status, 409, "{}", entries.text);
    assert!(entries.text.contains("top_p"), "{}", entries.text);
}

#[tokio::test]
async fn a_session_for_training_pins_the_models_own_distribution() {
    let app = toy();
    let made = json!({"session_id": "s", "purpose": "train", "sampling": {"temperature": 0.5}});
    ask(&app, "/sessions", &made).await.ok();
    let fields = json!({"top_p": 0.5, "temperature": 0, "seed": 3, "presence_penalty": 1});
    chat_turn(&app, &[user("hi")], &fields).await;
    let document = document(&app, "s").await;
    let turn = &document["turns"][0];
    assert_eq!(turn["why_context"], Value::Null);
    assert_eq!(turn["sampling_params"]["temperature"], 0.5);
    assert_eq!(turn["sampling_params"]["top_p"], 1.0);
    assert_eq!(turn["sampling_params"].get("seed"), None);
    assert_eq!(turn["requested_sampling_params"]["top_p"], 0.5);
    for fields in [
        json!({"logit_bias": {"65": 5}}),
        json!({"tool_choice": "required"}),
        json!({"response_format": {"type": "json_object"}}),
    ] {
        let refused = ask(&app, CHAT, &chat(&[user("hi")], &fields)).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
        assert!(refused.text.contains("for training"), "{}", refused.text);
    }
    let bad = json!({"purpose": "train", "sampling": {"top_p": 0.9}});
    assert_eq!(ask(&app, "/sessions", &bad).await.status, 400);
}

#[tokio::test]
async fn a_request_for_more_than_fits_is_cut_and_a_prompt_that_does_not_fit_is_refused() {
    let app = toy();
    let fields = json!({"max_tokens": 100_000, "stop": ["e", "a", "i", "t", " "]});
    chat_turn(&app, &[user("hi")], &fields).await;
    let turn = document(&app, "s").await["turns"][0].clone();
    let cut = turn["sampling_params"]["max_tokens"].as_u64().unwrap();
    assert_eq!(cut + turn["n_prompt"].as_u64().unwrap(), 2048);
    let long = ask(&app, CHAT, &chat(&[user(&"x".repeat(3000))], &json!({}))).await;
    assert_eq!(long.status, 400);
    assert_eq!(long.json()["error"]["code"], "context_length_exceeded");
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_nothing() {
    let app = toy();
    let mut body = chat(&[user("hi")], &json!({"max_tokens": 1500}));
    body["stream"] = Value::Bool(true);
    let request = HttpRequest::post("/s/v1/chat/completions");
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response = app.clone().oneshot(request).await.unwrap();
    assert_eq!(response.status(), 200);
    drop(response);
    // The next call is served; by then the other is gone or still going.
    chat_turn(&app, &[user("ho")], &json!({})).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let document = document(&app, "s").await;
    assert_eq!(document["stats"]["n_turns"], 1, "{}", document["turns"]);
}
