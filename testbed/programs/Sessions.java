import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.Map;

/** What a server does to a heap: a store that is looked up and now and then changed, and short-lived garbage at each request. */
public final class Sessions {
    private static final int SESSIONS = 60_000;
    private static final int REQUESTS = 4_000_000;

    public static void main(String[] arguments) {
        Map<Integer, byte[]> store = new HashMap<>();
        for (int at = 0; at < SESSIONS; at++) {
            store.put(at, new byte[512]);
        }
        ArrayDeque<byte[]> recent = new ArrayDeque<>();
        long state = 1;
        long sum = 0;
        for (int request = 0; request < REQUESTS; request++) {
            state = state * 6364136223846793005L + 1;
            int key = (int) ((state >>> 33) % SESSIONS);
            byte[] session = store.get(key);
            byte[] answer = session.clone();
            sum += answer[request % answer.length];
            recent.addLast(answer);
            if (recent.size() > 1000) {
                recent.removeFirst();
            }
            if (request % 10 == 0) {
                answer[0]++;
                store.put(key, answer);
            }
        }
        System.out.println(sum);
    }
}
