//! Relays the stream from the sending `xl` to the receiving one. It sets in the domain's configuration where the memory comes
//! from, and passes on the rest unchanged.
//!
//! It also enforces a move's time limit. If the relay ends early, the receiver lacks the end of the stream and gives up, and the
//! sender's domain keeps running. Once everything was sent, the relay continues even after the time limit, so that both sides
//! agree on which of the two domains runs.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::devices::{self, Device};
use super::error::{StreamError, Unmovable};
use super::stream::{self, Follower, HEAD_BYTES};
use super::{Job, files};
use crate::library::Store;
use crate::store::{Asking, Source};

const CHUNK_BYTES: usize = 1 << 20;
/// How often to report progress.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// Relays the stream to its end.
///
/// # Errors
/// Returns why it failed; the domain then stays where it is.
pub fn relay() -> Result<(), StreamError> {
    let job = Job::of_environment()?;
    let _copying = files::lock(files::COPYING)?.ok_or(StreamError::Busy)?;
    let is_over = Arc::new(AtomicBool::new(false));
    end_in_time(&job, Arc::clone(&is_over));
    let input =
        rustix::io::dup(rustix::stdio::stdin()).map_err(|error| StreamError::System(error.to_string()))?;
    let output =
        rustix::io::dup(rustix::stdio::stdout()).map_err(|error| StreamError::System(error.to_string()))?;
    let mut store = Asking::start(Source::of(Store::load()?));
    copied(
        &job,
        (&mut File::from(input), &mut File::from(output)),
        &is_over,
        &mut files::copied,
        &mut || devices::attached(&mut store, job.domid, &devices::found),
    )
}

/// Ends this process at the time limit, unless everything was sent by then.
fn end_in_time(job: &Job, is_over: Arc<AtomicBool>) {
    let (name, time) = (job.name.clone(), job.time_max);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_nanos(time.0));
        if !is_over.swap(true, Ordering::SeqCst) {
            let _ = writeln!(
                std::io::stderr(),
                "homenode: domain {name} was not copied within {time}"
            );
            std::process::exit(1);
        }
    });
}

/// Passes on the stream, and reports the number of pages regularly. Lets the end pass only if the domain still has the same
/// devices, because the configuration, which was sent before, lists only those.
fn copied(
    job: &Job,
    (input, output): (&mut dyn Read, &mut dyn Write),
    is_over: &AtomicBool,
    say: &mut dyn FnMut(u64),
    attached: &mut dyn FnMut() -> Result<Vec<Device>, Unmovable>,
) -> Result<(), StreamError> {
    let read = |error: std::io::Error| StreamError::Read(error.to_string());
    let write = |error: std::io::Error| StreamError::Write(error.to_string());
    let mut head = [0; HEAD_BYTES];
    input.read_exact(&mut head).map_err(read)?;
    let mut data = vec![0; stream::configuration_bytes(&head)?];
    input.read_exact(&mut data).map_err(read)?;
    let mut of = stream::configuration(&data)?;
    job.fits(&of)?;
    let devices = attached()?;
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
        if follower.is_over() && !was_over {
            if attached()? != devices {
                return Err(StreamError::DevicesChanged);
            }
            // If the time ran out before the end of the stream, the end is not passed on.
            if is_over.swap(true, Ordering::SeqCst) {
                return Err(StreamError::Late);
            }
        }
        output.write_all(chunk).map_err(write)?;
        if said.elapsed() >= SAY_EVERY || follower.is_over() != was_over {
            said = Instant::now();
            say(follower.pages);
        }
    }
    match follower.is_over() {
        true => Ok(()),
        false => Err(StreamError::CutOff),
    }
}

#[cfg(test)]
mod tests {
    use super::super::configuration::tests::KEPT;
    use super::super::stream::tests::{head, sent};
    use super::*;
    use homenode_units::{NodeId, Ns, VmId};

    fn job(name: &str, still: bool) -> Job {
        Job {
            vm: VmId::parse("560f06d7-3070-4efa-981f-ca7533542446").unwrap(),
            domid: 2,
            name: name.into(),
            to: NodeId(1),
            still,
            hard: [(0, "1-3".parse().unwrap())].into(),
            soft: [(0, "3".parse().unwrap())].into(),
            nodemap: None,
            time_max: Ns::from_secs(60),
        }
    }

    /// Returns everything that `xl` sends for a domain.
    fn whole() -> Vec<u8> {
        let text = [KEPT.as_bytes(), &[0]].concat();
        let data = [&(text.len() as u32).to_le_bytes()[..], &text].concat();
        [head(data.len() as u32).to_vec(), data, sent(), b"talk".to_vec()].concat()
    }

    fn relayed(job: &Job, input: &[u8], is_over: bool) -> (Result<(), StreamError>, Vec<u8>, u64) {
        relayed_with(job, input, is_over, &mut || Ok(Vec::new()))
    }

    fn relayed_with(
        job: &Job,
        input: &[u8],
        is_over: bool,
        attached: &mut dyn FnMut() -> Result<Vec<Device>, Unmovable>,
    ) -> (Result<(), StreamError>, Vec<u8>, u64) {
        let (mut output, mut pages) = (Vec::new(), 0);
        let (is_over, mut say) = (AtomicBool::new(is_over), |count| pages = count);
        let result = copied(job, (&mut &*input, &mut output), &is_over, &mut say, attached);
        (result, output, pages)
    }

    fn configuration_of(output: &[u8]) -> (super::super::Configuration, &[u8]) {
        let (first, rest) = output.split_at(HEAD_BYTES);
        let (data, rest) = rest.split_at(stream::configuration_bytes(first.try_into().unwrap()).unwrap());
        (stream::configuration(data).unwrap(), rest)
    }

    #[test]
    fn all_is_passed_on_with_another_node() {
        for (still, name) in [(false, "pvh"), (true, "pvh--incoming")] {
            let (result, output, pages) = relayed(&job("pvh", still), &whole(), false);
            assert_eq!((result, pages), (Ok(()), 2));
            let (of, rest) = configuration_of(&output);
            assert_eq!(
                (of.name(), of.nodemap()),
                (Some(name), Some(&serde_json::json!([1])))
            );
            assert_eq!(rest, [sent(), b"talk".to_vec()].concat());
        }
    }

    #[test]
    fn what_is_late_cut_off_or_of_another_domain_does_not_arrive() {
        let all = whole();
        let end = sent().len() + b"talk".len();
        let (result, output, _) = relayed(&job("pvh", false), &all, true);
        assert!(result.unwrap_err().to_string().contains("time") && output.len() <= all.len());
        assert_eq!(
            configuration_of(&output).1,
            b"",
            "the end went out with the first chunk"
        );
        for kept in [0, HEAD_BYTES, all.len() - end, all.len() - b"talk".len() - 1] {
            let (result, ..) = relayed(&job("pvh", false), &all[..kept], false);
            assert!(result.is_err(), "{kept}");
        }
        let (result, output, _) = relayed(&job("other", false), &all, false);
        assert!(result.unwrap_err().to_string().contains("another domain") && output.is_empty());
    }

    #[test]
    fn a_domain_whose_devices_change_meanwhile_stays() {
        let disk = || ("vbd".to_owned(), "51712".to_owned());
        let mut attached = [vec![disk()], Vec::new()].into_iter();
        let mut attached = || Ok(attached.next().unwrap_or_default());
        let (result, output, _) = relayed_with(&job("pvh", false), &whole(), false, &mut attached);
        assert!(
            result.unwrap_err().to_string().contains("detached") && configuration_of(&output).1.is_empty()
        );
        let mut attached = || Ok(vec![disk()]);
        assert_eq!(
            relayed_with(&job("pvh", false), &whole(), false, &mut attached).0,
            Ok(())
        );
        let mut refused = || Err(Unmovable::Device("vfb".to_owned()));
        let (result, output, _) = relayed_with(&job("pvh", false), &whole(), false, &mut refused);
        assert!(result.unwrap_err().to_string().contains("vfb") && output.is_empty());
    }

    #[test]
    fn a_job_reads_back_as_written() {
        let job = job("pvh", true);
        let text = serde_json::to_string(&job).unwrap();
        assert_eq!(serde_json::from_str::<Job>(&text).unwrap(), job);
    }
}
