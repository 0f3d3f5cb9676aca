//! Requests of programs and browsers to a running agent over HTTP.

use std::io::{BufRead, BufReader, Read as _, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::http::Site;
use crate::common::{json, refused, run};

/// A VM that streams through memory, and a VM that arrives later, whose name must be escaped everywhere.
const SCENARIO: &str = "\
name = \"two\"
machine = \"r420\"
duration = \"36000s\"
[[vm]]
name = \"web\"
vcpus = 2
memory = \"4GiB\"
workload = \"stream\"
work_share = 1000.0
[[vm]]
name = 'db \"two\"'
vcpus = 1
memory = \"1GiB\"
workload = \"povray\"
work_share = 1000.0
arrival = \"2s\"
";

fn site(args: &[&str]) -> Site {
    Site::on(tempfile::tempdir().unwrap(), SCENARIO, args)
}

/// Panics if an answer does not match the committed description.
fn is_as_described(path: &str, answer: &Value) {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/schema/openapi.json");
    let whole: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let operation = &whole["paths"][path];
    let method = if operation["get"].is_object() {
        "get"
    } else {
        "post"
    };
    let schema = operation[method]["responses"]["200"]["content"]["application/json"]["schema"].clone();
    assert!(schema.is_object(), "{path} is not described");
    let schema = json!({"components": whole["components"], "allOf": [schema]});
    let validator = jsonschema::validator_for(&schema).expect("it is a schema");
    let errors: Vec<String> = validator
        .iter_errors(answer)
        .map(|e| format!("{}: {e}", e.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{path}: {errors:#?}");
}

#[test]
fn what_is_asked_is_answered_as_described_and_as_commands_print_it() {
    let site = site(&["--period", "100ms", "--policies", "homenode"]);
    site.eventually("both VMs are there", |site| {
        (site.json("/v1/vms")["vms"].as_array()?.len() == 2).then_some(())
    });
    for path in ["/v1/status", "/v1/vms", "/v1/overview", "/v1/nodes", "/v1/links"] {
        is_as_described(path, &site.json(path));
    }
    assert_eq!(site.json("/v1/openapi.json")["openapi"], "3.1.0");
    let web = site.json("/v1/vms/web");
    is_as_described("/v1/vms/{id}", &web);
    let id = web["id"].as_str().unwrap();
    assert_eq!(
        site.json(&format!("/v1/vms/{}", id.to_uppercase()))["name"],
        "web"
    );
    assert_eq!(site.json("/v1/vms/db%20%22two%22")["name"], "db \"two\"");
    let state = site.dir.path().join("state").display().to_string();
    let printed = json(&run(&["vm", "--state", &state, "--json"]));
    assert_eq!(printed["vms"][1]["id"], web["id"]);
    // The socket gives the same answers, whatever the header Host is, but only to the agent's user.
    assert_eq!(site.over_socket("/v1/nodes").status, 200);
    let socket = std::fs::metadata(site.dir.path().join("state/http.sock")).unwrap();
    assert_eq!(socket.permissions().mode() & 0o777, 0o600);

    let place = |vcpus: u32, memory: u64| {
        let body = json!({"vcpus": vcpus, "memory_bytes": memory}).to_string();
        let answer = site.ask(
            "POST",
            "/v1/placements/evaluate",
            "Content-Type: application/json\r\n",
            &body,
        );
        assert_eq!(answer.status, 200, "{answer:?}");
        is_as_described("/v1/placements/evaluate", &answer.json());
        answer.json()
    };
    let (small, large) = (place(1, 1 << 30), place(8, 1 << 30));
    assert!(
        small["fits"] == true && small["score"].as_f64() > large["score"].as_f64(),
        "{small} {large}"
    );
    let none = place(1, 1 << 50);
    assert!(
        none["fits"] == false && none["score"] == 0.0 && none["nodes"].is_null(),
        "{none}"
    );
}

#[test]
fn headroom_is_what_a_vm_can_get() {
    let site = site(&["--period", "100ms", "--policies", "homenode"]);
    site.eventually("both VMs are there", |site| {
        (site.json("/v1/vms")["vms"].as_array()?.len() == 2).then_some(())
    });
    let told = |metric: &str| {
        let text = site.get("/metrics").body;
        let ours = text
            .lines()
            .filter_map(|line| line.strip_prefix(metric)?.strip_prefix('{'));
        let figures = ours.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap());
        figures.fold(0.0, f64::max)
    };
    let nodes = |vcpus: f64, bytes: f64| {
        let body = json!({"vcpus": vcpus.floor(), "memory_bytes": bytes.floor()}).to_string();
        let headers = "Content-Type: application/json\r\n";
        let answer = site.ask("POST", "/v1/placements/evaluate", headers, &body).json();
        answer["nodes"].as_array().map_or(0, Vec::len)
    };
    let (memory, cpus) = (
        told("homenode_node_headroom_memory_bytes"),
        told("homenode_node_headroom_cpus"),
    );
    // The figure changes a little with each sample, since VMs run.
    assert_eq!(nodes(1.0, 0.9 * memory), 1, "{memory}");
    assert_ne!(nodes(1.0, 1.1 * memory), 1, "{memory}");
    // Headroom counts hyperthreads, two for each core. A VM gets a core for each vCPU if there are enough cores.
    assert_eq!(nodes(cpus / 2.0 - 1.0, 1e9), 1, "{cpus}");
    assert_ne!(nodes(cpus + 3.0, 1e9), 1, "{cpus}");
    let bandwidth = told("homenode_node_headroom_memory_bandwidth_bytes_per_second");
    let max = told("homenode_node_memory_bandwidth_max_bytes_per_second");
    assert!((0.5 * max..=max).contains(&bandwidth), "{bandwidth} of {max}");
}

#[test]
fn the_past_is_told_in_pages_and_in_steps() {
    let site = site(&["--fast", "--policies", "tavo", "--duration", "36000s"]);
    site.eventually("something was decided", |site| {
        let all = site.json("/v1/decisions");
        (all["decisions"].as_array()?.len() >= 3).then_some(())
    });
    let whole = site.json("/v1/decisions?to=2200-01-01T00:00:00Z");
    is_as_described("/v1/decisions", &whole);
    let newest = whole["decisions"].as_array().unwrap();
    let ids: Vec<i64> = newest.iter().map(|d| d["id"].as_i64().unwrap()).collect();
    assert!(ids.is_sorted_by(|a, b| a > b), "the newest first: {ids:?}");
    // The pages together have the same decisions, except for decisions made since.
    let (mut paged, mut next) = (Vec::new(), Some((ids[0] + 1).to_string()));
    while let Some(cursor) = next {
        let page = site.json(&format!("/v1/decisions?limit=1&cursor={cursor}"));
        paged.extend(
            page["decisions"]
                .as_array()
                .unwrap()
                .iter()
                .map(|d| d["id"].as_i64().unwrap()),
        );
        next = page["next"].as_str().map(str::to_owned);
    }
    assert_eq!(paged[..ids.len()], ids);
    let policy = newest[0]["policy"].as_str().unwrap();
    let of_one = site.json(&format!("/v1/decisions?policy={policy}&vm=web"));
    assert!(
        of_one["decisions"]
            .as_array()
            .unwrap()
            .iter()
            .all(|d| d["policy"] == policy && d["name"] == "web")
    );

    let started = site.json("/v1/status")["started"].as_str().unwrap().to_owned();
    site.eventually("two minutes are over", |site| {
        (site.json("/v1/status")["cycle_count"].as_u64()? > 130).then_some(())
    });
    let from: chrono::DateTime<chrono::Utc> = started.parse().unwrap();
    let to = (from + Duration::from_secs(120)).to_rfc3339().replace('+', "%2B");
    let of_web = site.json(&format!("/v1/history?vm=web&from={started}&to={to}&step=30s"));
    is_as_described("/v1/history", &of_web);
    let points = of_web["points"].as_array().unwrap();
    assert!((4..=5).contains(&points.len()), "{of_web}");
    assert_eq!(points[1]["periods_count"], 30);
    assert!(points[1]["cpus_used"].as_f64().unwrap() > 0.5, "{of_web}");
    // The overview of the past shows the host at that time, with the events until then.
    let minute = from + Duration::from_secs(60);
    let then = site.json(&format!(
        "/v1/overview?at={}",
        minute.to_rfc3339().replace('+', "%2B")
    ));
    is_as_described("/v1/overview", &then);
    let seen: chrono::DateTime<chrono::Utc> = then["time"].as_str().unwrap().parse().unwrap();
    assert!((minute - seen).num_milliseconds().abs() <= 1000, "{then}");
    let at_s = then["at_ns"].as_f64().unwrap() / 1e9;
    assert!((at_s - 60.0).abs() <= 1.0, "{then}");
    assert_eq!(then["vms"][1]["name"], "web");
    assert!(
        then["events"]
            .as_array()
            .unwrap()
            .iter()
            .any(|event| event["kind"] == "appeared")
    );
    for at in ["2001-01-01T00:00:00Z", "2200-01-01T00:00:00Z"] {
        let none = site.get(&format!("/v1/overview?at={at}"));
        assert_eq!((none.status, none.problem().as_str()), (404, "nothing-known"));
        assert!(none.body.contains("the history covers"), "{none:?}");
    }
    let before = site.json("/v1/history?vm=web&from=2001-01-01T00:00:00Z&to=2001-01-01T01:00:00Z");
    assert_eq!(before["points"], json!([]));
}

#[test]
fn what_is_asked_wrongly_is_refused_with_a_problem_that_names_the_remedy() {
    let site = site(&["--period", "100ms"]);
    site.eventually("a VM is there", |site| {
        (site.get("/v1/vms/web").status == 200).then_some(())
    });
    for (path, status, kind, said) in [
        ("/v1/nope", 404, "no-such-path", "openapi.json"),
        ("/v1/vms/absent", 404, "no-such-vm", "web"),
        ("/assets/nope.js", 404, "no-such-path", ""),
        ("/assets/..%2fCargo.toml", 404, "no-such-path", ""),
        ("/assets/%ff", 400, "bad-parameter", ""),
        ("/v1/overview?at=now", 400, "bad-parameter", "03:12:00Z"),
        ("/v1/vms/%ff", 400, "bad-parameter", ""),
        ("/v1/history?vm=absent", 404, "no-such-vm", "web"),
        ("/v1/history", 400, "bad-parameter", "vm"),
        (
            "/v1/history?vm=web&from=yesterday",
            400,
            "bad-parameter",
            "03:12:00Z",
        ),
        ("/v1/history?vm=web&step=1", 400, "bad-parameter", "900s"),
        ("/v1/decisions?limit=0", 400, "bad-parameter", "1000"),
        ("/v1/decisions?limit=-1", 400, "bad-parameter", "limit"),
        ("/v1/decisions?cursor=x", 400, "bad-parameter", "next"),
        ("/v1/decisions?vm=a&vm=b", 400, "bad-parameter", "vm"),
        ("/v1/decisions?what=1", 400, "bad-parameter", "what"),
        ("/v1/placements/evaluate", 405, "wrong-method", "Allow"),
    ] {
        let answer = site.get(path);
        assert_eq!(
            (answer.status, answer.problem().as_str()),
            (status, kind),
            "{path}: {answer:?}"
        );
        assert!(answer.body.contains(said), "{path}: {answer:?}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"] {
        let answer = site.ask(method, "/v1/vms", "", "");
        assert_eq!(
            (answer.status, answer.problem().as_str()),
            (405, "wrong-method"),
            "{method}"
        );
        assert!(answer.head.contains("allow: get,head"), "{answer:?}");
    }
    let evaluate = |headers: &str, body: &str| site.ask("POST", "/v1/placements/evaluate", headers, body);
    let as_json = "Content-Type: application/json\r\n";
    let long = format!(
        "{{\"vcpus\": 1, \"memory_bytes\": 1, \"x\": \"{}\"}}",
        "x".repeat(1 << 20)
    );
    for (headers, body, status) in [
        ("", "{}", 415),
        (as_json, "{", 400),
        (as_json, "{}", 422),
        (as_json, "{\"vcpus\": 0, \"memory_bytes\": 1}", 422),
        (as_json, "{\"vcpus\": 1, \"memory_bytes\": -1}", 422),
        (as_json, "{\"vcpus\": 1.5, \"memory_bytes\": 1}", 422),
        (as_json, "{\"vcpus\": 1, \"memory_bytes\": 1e300}", 422),
        (as_json, "{\"vcpus\": 1, \"memory_bytes\": 1, \"more\": 1}", 422),
        (as_json, &long, 413),
    ] {
        let answer = evaluate(headers, body);
        assert_eq!(answer.status, status, "{headers}{body:.80}: {answer:?}");
        answer.problem();
    }
}

#[test]
fn what_is_no_http_or_comes_from_elsewhere_is_refused_and_the_agent_goes_on() {
    let site = site(&[]);
    let said = |text: &str| site.say(text.as_bytes()).status;
    let long = "x".repeat(100_000);
    assert_eq!(
        said(&format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n")),
        431
    );
    assert_eq!(
        said(&format!("GET /{long} HTTP/1.1\r\nHost: localhost\r\n\r\n")),
        431
    );
    let many: String = (0..500).map(|n| format!("X{n}: 1\r\n")).collect();
    assert_eq!(
        said(&format!("GET / HTTP/1.1\r\nHost: localhost\r\n{many}\r\n")),
        431
    );
    for nonsense in [
        "nonsense\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "\0\0\0\0",
        "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    ] {
        assert!(matches!(said(nonsense), 0 | 400), "{nonsense:?}");
    }
    let get = |headers: &str| {
        said(&format!(
            "GET /v1/nodes HTTP/1.1\r\nConnection: close\r\n{headers}\r\n"
        ))
    };
    assert_eq!(get("Host: localhost\r\n"), 200);
    assert_eq!(get("Host: homenode.evil.example\r\n"), 403);
    assert_eq!(get(""), 400);
    assert_eq!(get("Host: localhost\r\nOrigin: http://evil.example\r\n"), 403);
    assert_eq!(get("Host: localhost\r\nOrigin: http://localhost\r\n"), 200);
    // A foreign Host is refused even for a path that does not exist.
    let metrics = "GET /metrics HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    assert_eq!(said(metrics), 403);
    assert_eq!(
        said("GET /nope HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"),
        403
    );
    assert_eq!(site.get("/-/healthy").status, 200);

    for address in ["0.0.0.0:0", "192.0.2.1:80", "[::]:0", "[::ffff:127.0.0.1]:0"] {
        let (status, said) = refused(&run(&["run", "--host", "twin", "--listen", address]));
        assert!(
            status == 2 && said.contains("TLS") && said.contains("127.0.0.1"),
            "{address}: {status} {said}"
        );
    }
    let taken = site.address.to_string();
    let (status, said) = refused(&run(&[
        "run",
        "--host",
        "twin",
        "--listen",
        &taken,
        "--duration",
        "1s",
    ]));
    assert!(
        status == 1 && said.contains("another port") || said.contains("choose another"),
        "{status} {said}"
    );
}

/// Reads this many events of a stream. Returns id, kind and data of each.
fn events(site: &Site, headers: &str, count: usize) -> Vec<(String, String, Value)> {
    let mut stream = site.connect();
    write!(
        stream,
        "GET /v1/events HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n"
    )
    .unwrap();
    let (mut found, mut id, mut kind) = (Vec::new(), String::new(), String::new());
    for line in BufReader::new(stream).lines() {
        let line = line.expect("the stream goes on");
        match line.split_once(": ") {
            Some(("id", text)) => text.clone_into(&mut id),
            Some(("event", text)) => text.clone_into(&mut kind),
            Some(("data", text)) => {
                found.push((id.clone(), kind.clone(), serde_json::from_str(text).unwrap()));
                id.clear();
            }
            _ => {}
        }
        if found.len() == count {
            break;
        }
    }
    found
}

#[test]
fn a_stream_goes_on_after_what_was_heard_last_and_says_what_is_missing() {
    let site = site(&["--period", "100ms"]);
    let first = events(&site, "", 5);
    let counts: Vec<u64> = first
        .iter()
        .filter_map(|(_, _, data)| data["cycle_count"].as_u64())
        .collect();
    assert!(counts.windows(2).all(|pair| pair[1] == pair[0] + 1), "{first:?}");
    // After the second event, no event is repeated and none is missing.
    let heard = |id: &str| format!("Last-Event-ID: {id}\r\n");
    let again = events(&site, &heard(&first[1].0), 3);
    assert_eq!(again[..], first[2..]);
    // Events of another run are gone, so a gap is reported, and then everything that is left of this run follows.
    let other = events(&site, &heard("77-123"), 3);
    assert_eq!(
        (other[0].1.as_str(), &other[0].2["missed_count"]),
        ("gap", &Value::Null)
    );
    assert!(other[1].0.ends_with("-0"), "{other:?}");
    // Events that have left the ring are a gap, too, which has the number of missed events.
    let fast = Site::on(
        tempfile::tempdir().unwrap(),
        SCENARIO,
        &["--fast", "--duration", "36000s"],
    );
    let begin = events(&fast, &heard("x-0"), 2)[1].0.clone();
    let run = begin.split('-').next().unwrap().to_owned();
    fast.eventually("the ring is full", |fast| {
        (fast.json("/v1/status")["cycle_count"].as_u64()? > 6000).then_some(())
    });
    let late = events(&fast, &heard(&format!("{run}-0")), 2);
    let missed = late[0].2["missed_count"].as_u64().unwrap();
    assert!(
        late[0].1 == "gap" && late[1].0 == format!("{run}-{}", missed + 1),
        "{late:?}"
    );
}

/// Returns the value of the metric whose line starts with `begin`.
fn figure(text: &str, begin: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(begin))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn metrics_are_there_in_both_formats_and_absent_where_nothing_is_measured() {
    let site = site(&["--period", "100ms"]);
    let text = site.eventually("the second VM is measured", |site| {
        let text = site.get("/metrics").body;
        text.contains("homenode_vm_cpus_used{domain=\"db \\\"two\\\"\"}")
            .then_some(text)
    });
    assert!(
        figure(&text, "homenode_vm_memory_bytes{domain=\"web\",node=\"0\"}").is_some(),
        "{text}"
    );
    assert!(figure(&text, "homenode_link_bytes_total{from=\"0\",to=\"1\"}").is_some());
    assert_eq!(figure(&text, "homenode_series_dropped"), Some(0.0));
    // No permit is booked, and no memory taken: both metrics are absent instead of 0.
    assert!(!text.contains("homenode_vm_permit") && !text.contains("homenode_vm_memory_limit"));
    let open = site.ask(
        "GET",
        "/metrics",
        "Accept: application/openmetrics-text;version=1.0.0\r\n",
        "",
    );
    assert!(
        open.head
            .contains("content-type: application/openmetrics-text; version=1.0.0"),
        "{}",
        open.head
    );
    assert!(open.body.ends_with("# EOF\n") && open.body.contains("# TYPE homenode_vm info\n"));
    assert!(
        text.contains("homenode_vm_local_access_ratio{domain=\"web\",counted_by=\"hardware\"}"),
        "{text}"
    );
    let uncounted = format!("{SCENARIO}[disturbance]\nno_llc_counters = true\n");
    let uncounted = Site::on(tempfile::tempdir().unwrap(), &uncounted, &["--period", "100ms"]);
    let text = uncounted.eventually("a VM is measured", |site| {
        let text = site.get("/metrics").body;
        text.contains("homenode_vm_cpus_used{").then_some(text)
    });
    assert!(
        !text.contains("homenode_vm_local_access_ratio") && !text.contains("homenode_vm_llc"),
        "{text}"
    );
}

#[test]
fn two_hundred_slow_clients_delay_no_cycle_and_no_scrape() {
    let site = site(&["--period", "100ms"]);
    let cycles = || figure(&site.get("/metrics").body, "homenode_cycles_total").unwrap();
    let pace = |seconds: u64| {
        let (begun, first) = (Instant::now(), cycles());
        std::thread::sleep(Duration::from_secs(seconds));
        (cycles() - first) / begun.elapsed().as_secs_f64()
    };
    let alone = pace(3);
    // A third of the clients send a request byte by byte, a third ask for much and read nothing, and a third subscribe to events
    // and read nothing.
    let ask_much = "GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(400);
    let listen = "GET /v1/events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 0-0\r\n\r\n";
    let mut slow: Vec<_> = (0..200).map(|n| (n % 3, site.connect())).collect();
    for (kind, stream) in &mut slow {
        stream.set_nonblocking(true).unwrap();
        // Writes as much as fits without waiting.
        let _ = match kind {
            1 => stream.write(ask_much.as_bytes()),
            2 => stream.write(listen.as_bytes()),
            _ => stream.write(b"G"),
        };
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    let beside = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for (_, stream) in slow.iter_mut().filter(|(kind, _)| *kind == 0) {
                    let _ = stream.write(b"E");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let beside = pace(6);
        let asked = Instant::now();
        assert_eq!(site.get("/metrics").status, 200);
        let took = asked.elapsed();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(took < Duration::from_secs(5), "a scrape took {took:?}");
        beside
    });
    assert!(
        beside > 0.8 * alone,
        "{alone:.1} cycles a second alone, {beside:.1} beside slow clients"
    );
}

#[test]
fn clients_of_the_address_take_no_room_on_the_socket() {
    let site = site(&["--period", "100ms"]);
    let mut kept = UnixStream::connect(site.dir.path().join("state/http.sock")).unwrap();
    kept.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut is_answered = || {
        kept.write_all(b"HEAD /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
        let mut said = [0; 4096];
        kept.read(&mut said)
            .map(|count| said[..count].starts_with(b"HTTP/1.1 200"))
    };
    assert!(is_answered().unwrap());
    // Above the limit of connections, only the oldest connections to the address are closed.
    let mut crowd: Vec<_> = (0..300).map(|_| site.connect()).collect();
    assert_eq!(site.get("/metrics").status, 200);
    assert_eq!(
        crowd[0].read(&mut [0; 1]).unwrap(),
        0,
        "the oldest is still inside"
    );
    assert!(is_answered().unwrap());
}
