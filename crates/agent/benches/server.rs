//! What an answer of the agent takes, and what it takes beside a thousand clients that say nothing: a ratio of one run.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use homenode_agent::Handler;
use homenode_agent::server::Server;
use homenode_agent::setting_queue::SettingQueue;
use homenode_api::answer::Vms;
use homenode_api::{Request, ask, socket_path};
use homenode_control::{Config, Control, Mode};
use homenode_host::{Bell, Host};
use homenode_twin::{Scenario, Twin};

const SILENT: usize = 1000;

fn answers(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a directory");
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    let mut twin = Twin::new(machine.clone(), &Scenario::tavo_mixed(), 1).expect("a twin");
    let mut control = Control::new(Config::default(), Mode::Act);
    let sample = twin.sample().expect("a sample");
    control.begin(&machine, sample);
    let handler = Handler {
        machine: Arc::new(machine),
        control: Arc::new(Mutex::new(control)),
    };
    let _server = Server::open(dir.path(), handler, SettingQueue::new(&Bell::default())).expect("a server");
    let answered = |_| {
        let vms: Option<Vms> = ask(dir.path(), &Request::Vms).expect("an answer");
        vms.expect("an agent").vms.len()
    };
    c.bench_function("answer", |b| b.iter(|| answered(())));
    c.bench_function("answer beside 1000 silent clients", |b| {
        b.iter_batched(
            || silent(dir.path()),
            answered_beside(&answered),
            BatchSize::PerIteration,
        );
    });
}

fn answered_beside<'a>(
    answered: &'a impl Fn(()) -> usize,
) -> impl FnMut(Vec<UnixStream>) -> (usize, Vec<UnixStream>) + 'a {
    |silent| (answered(()), silent)
}

/// Clients that have connected and say nothing; a connection that is refused for now is tried again.
fn silent(state: &Path) -> Vec<UnixStream> {
    let path = socket_path(state);
    let connect = |_| loop {
        if let Ok(stream) = UnixStream::connect(&path) {
            return stream;
        }
        std::thread::yield_now();
    };
    (0..SILENT).map(connect).collect()
}

criterion_group!(benches, answers);
criterion_main!(benches);
