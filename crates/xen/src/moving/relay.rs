//! Stands between the `xl` that sends a domain and the one that makes it anew: says in its configuration where its memory comes
//! from, and passes on the rest.
//!
//! It is what bounds a move's time. Where it ends early the receiver lacks the end, gives up, and the sender's domain runs on;
//! once all was sent it stays, whatever the time: the two then agree on which of both runs.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::stream::{self, Follower, HEAD_BYTES};
use super::{Job, files};

const CHUNK_BYTES: usize = 1 << 20;
/// How often is said how far it is.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// Relays what is sent, until it ends.
///
/// # Errors
/// Why it cannot be: the domain then stays where it is.
pub fn relay() -> Result<(), String> {
    let job = Job::of_environment()?;
    let _copying = files::lock(files::COPYING)?.ok_or("another domain is being copied")?;
    let is_over = Arc::new(AtomicBool::new(false));
    end_in_time(&job, Arc::clone(&is_over));
    let input = rustix::io::dup(rustix::stdio::stdin()).map_err(|error| error.to_string())?;
    let output = rustix::io::dup(rustix::stdio::stdout()).map_err(|error| error.to_string())?;
    copied(&job, &mut File::from(input), &mut File::from(output), &is_over)
}

/// Ends this process when it is time, unless all was sent.
fn end_in_time(job: &Job, is_over: Arc<AtomicBool>) {
    let (name, time) = (job.name.clone(), job.time_max);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_nanos(time.0));
        if !is_over.swap(true, Ordering::SeqCst) {
            eprintln!("homenode: domain {name} was not copied within {time}");
            std::process::exit(1);
        }
    });
}

fn copied(job: &Job, input: &mut dyn Read, output: &mut dyn Write, is_over: &AtomicBool) -> Result<(), String> {
    let read = |error: std::io::Error| format!("what xl sends cannot be read: {error}");
    let write = |error: std::io::Error| format!("who receives the domain has gone: {error}");
    let mut head = [0; HEAD_BYTES];
    input.read_exact(&mut head).map_err(read)?;
    let mut data = vec![0; stream::configuration_bytes(&head)?];
    input.read_exact(&mut data).map_err(read)?;
    let mut of = stream::configuration(&data)?;
    job.fits(&of)?;
    of.set_nodemap(Some(serde_json::json!([job.to.0])));
    if job.still {
        of.rename(&job.incoming());
    }
    output.write_all(&stream::header(&head, &of)).map_err(write)?;

    let (mut follower, mut room, mut said) = (Follower::default(), vec![0; CHUNK_BYTES], Instant::now());
    loop {
        let count = input.read(&mut room).map_err(read)?;
        if count == 0 {
            break;
        }
        let chunk = &room[..count];
        let was_over = follower.is_over();
        follower.take(chunk)?;
        // The end is not let through if the time was over before it.
        if follower.is_over() && !was_over && is_over.swap(true, Ordering::SeqCst) {
            return Err("its time is over".into());
        }
        output.write_all(chunk).map_err(write)?;
        if said.elapsed() >= SAY_EVERY || follower.is_over() != was_over {
            said = Instant::now();
            files::copied(follower.pages);
        }
    }
    match follower.is_over() {
        true => Ok(()),
        false => Err("xl ended in the midst of the domain".into()),
    }
}
