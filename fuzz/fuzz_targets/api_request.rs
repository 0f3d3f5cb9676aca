//! Fuzzes the agent's requests and replies: one that can be parsed can be written as JSON and parsed again.

#![no_main]

use homenode_api::{Reply, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = serde_json::from_slice::<Request>(bytes) {
        let _ = request.is_for_the_loop();
        let written = serde_json::to_string(&request).expect("requests hold nothing that JSON cannot");
        let again =
            serde_json::from_str::<Request>(&written).unwrap_or_else(|error| panic!("{error}: {written}"));
        assert_eq!(again, request);
    }
    if let Ok(reply) = serde_json::from_slice::<Reply>(bytes) {
        let written = serde_json::to_string(&reply).expect("replies hold nothing that JSON cannot");
        let again =
            serde_json::from_str::<Reply>(&written).unwrap_or_else(|error| panic!("{error}: {written}"));
        assert_eq!(serde_json::to_string(&again).expect("as before"), written);
    }
});
